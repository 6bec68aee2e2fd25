"""From the bytes that an engine writes to the text that a caller reads: heal bytes removed, thinking told from content,
UTF-8 whole, stops cut.

It receives `Token`s in order and returns text with the tokens that carry it. It does no I/O, and does not know
engines, prompts or dialects.

Six stages, each with `feed` and `flush`, none aware of the others:

    Heal      drops the bytes that the prefix already has
    Channels  tells thinking from content by its tags; holds what may still become a tag
    Utf8      holds the bytes of an unfinished character
    Stop      holds content that may still become a stop, and ends at the first stop that completes
    Ending    ends an infill with its line or block (`blocks`)
    Overlap   holds what may be the suffix's beginning, and ends where an infill would repeat it

`Assembler` runs them token by token. What it returns does not depend on how the bytes were cut into tokens or the
tokens into steps: text that was released is never taken back. An unfinished character at the very end is left out, and
so is an unfinished tag where an answer was cut.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from legato.errors import GenerationFailed
from legato.text.endings import Ending
from legato.types import Channel, Job, TextToken, Token

__all__ = ["Assembler", "Channels", "Heal", "Overlap", "Piece", "Stop", "Utf8"]

_MAX_HEAD = 256
_MIN_OVERLAP = 3
"""Characters, without blanks, from which on the beginning of a suffix is no coincidence."""
_BRACKETS = {")": "(", "]": "[", "}": "{"}


class Heal:
    """Drops the first bytes of an answer, which must be `heal`."""

    def __init__(self, heal: bytes) -> None:
        self._left = heal

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that lies after the seam."""
        if not self._left:
            return data
        num = min(len(data), len(self._left))
        if data[:num] != self._left[:num]:
            raise GenerationFailed("the engine did not write the end of the prefix again")
        self._left = self._left[num:]
        return data[num:]

    def flush(self) -> bytes:
        """Nothing is ever held."""
        return b""


class Channels:
    """Splits an assistant's turn into thinking and content, at two tags that belong to neither.

    Thinking can only stand at the very beginning of a turn. `before` is what the turn has already: it decides what the
    answer begins with, and is not returned. Without tags all is content.
    """

    def __init__(self, open: bytes = b"", close: bytes = b"", *, is_opened: bool = False, before: bytes = b"") -> None:
        self._open = open
        self._close = close
        self._held = b""
        self._num_before = 0
        self.has_thinking = is_opened
        """Whether there is thinking in the turn, as far as is known."""
        self.channel: Channel | None = "reasoning" if is_opened else None if open else "content"
        """What the next byte belongs to; None: an opening tag may still come of what is held."""
        self.feed(before)
        self._num_before = len(self._held)

    @classmethod
    def of(cls, job: Job, pieces: Sequence[bytes], *, is_begun: bool) -> Channels:
        """Return those of a Job's turn, before anything of it or, if it `is_begun`, before the answer.

        `pieces` are the bytes of the tokens, by id.
        """
        thinking, prompt = job.thinking, job.prompt
        if thinking is None:
            return cls()
        open, close = (b"".join(pieces[id] for id in ids) for ids in (thinking.open_ids, thinking.close_ids))
        before = b"".join(pieces[id] for id in prompt.ids[prompt.turn :]) + prompt.heal if is_begun else b""
        return cls(open, close, is_opened=prompt.is_opened, before=before)

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of thinking, and those of content, that can no longer become part of a tag."""
        if self.channel == "content":
            return b"", data
        self._held += data
        if self.channel is None:
            if len(self._held) < len(self._open) and self._open.startswith(self._held):
                return b"", b""
            if not self._held.startswith(self._open):
                self.channel = "content"
                return b"", self.flush()
            self.channel = "reasoning"
            self.has_thinking = True
            self._held = self._held[len(self._open) :]
            self._num_before = 0
        at = self._held.find(self._close)
        if at >= 0:
            self.channel = "content"
            said = self._held[at + len(self._close) :]
            self._held = self._held[:at]
            return self.flush(), said
        keep = min(len(self._close) - 1, len(self._held))
        while not self._close.startswith(self._held[len(self._held) - keep :]):
            keep -= 1
        cut = len(self._held) - keep
        thought = self._held[self._num_before : cut]
        self._held = self._held[cut:]
        self._num_before = max(0, self._num_before - cut)
        return thought, b""

    def flush(self) -> bytes:
        """Return what was held: no tag came of it."""
        released = self._held[self._num_before :]
        self._held = b""
        self._num_before = 0
        return released


class Utf8:
    """Decodes UTF-8 incrementally; bytes that cannot be part of a character become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that `data` completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Leave out an unfinished character: continuing from the text writes it again, whole."""
        self._decoder.reset()
        return ""


class Stop:
    """Ends the text at the stop that completes first; of those that complete together, at the longest.

    `before` is text in front of the answer in which a stop may begin, but not end. After a match `matched` is the
    stop, and nothing more is returned.
    """

    def __init__(self, stops: Sequence[str], before: str = "") -> None:
        self._stops = stops
        self._openings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._max_opening = max((len(stop) - 1 for stop in stops), default=0)
        tail = before[len(before) - self._max_opening :] if self._max_opening < len(before) else before
        self._held = tail if self._max_opening else ""
        self._num_before = len(self._held)
        self.matched: str | None = None

    def feed(self, text: str, *, can_end: bool = True) -> str:
        """Return the text that can no longer become part of a stop. Unless `can_end`, no stop completes in `text`."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        scanned = len(self._held)
        self._held += text
        start = self._find(scanned) if can_end else None
        if start is not None:
            released = self._held[self._num_before : start]
            self._held = ""
            return released
        keep = min(self._max_opening, len(self._held))
        while keep and self._held[len(self._held) - keep :] not in self._openings:
            keep -= 1
        cut = len(self._held) - keep
        released = self._held[self._num_before : cut]
        self._held = self._held[cut:]
        self._num_before = max(0, self._num_before - cut)
        return released

    def flush(self) -> str:
        """Return what was held: no stop came of it."""
        released = self._held[self._num_before :] if self.matched is None else ""
        self._held = ""
        return released

    def _find(self, scanned: int) -> int | None:
        """Match the stop with the earliest end past `scanned`, then the earliest start; return its start."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, scanned - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                self.matched = stop
        return None if best is None else best[1]


class Overlap:
    """Ends an infill where it would repeat what follows the gap: at the first line of `suffix` that is not blank.

    Where the text ends by itself, what it has of the suffix's beginning is left out: three characters or more beside
    blanks, brackets that nothing in the text has opened, or a word that the suffix begins with and the text ends with.
    """

    def __init__(self, suffix: str) -> None:
        self._head = _head(suffix)
        self._is_told = _num_told(self._head) >= _MIN_OVERLAP
        self._word = re.match(r"\w*", suffix)[0]  # type: ignore[index]  # It always matches.
        self._released: list[str] = []
        """All of it, piece by piece."""
        self._held = ""
        self.is_over = False
        """Whether the suffix was about to be repeated; nothing fed after it has an effect."""

    def feed(self, text: str) -> str:
        """Return the text that can no longer belong to the suffix."""
        if self.is_over or not text:
            return ""
        if not self._head:
            return text
        self._held += text
        at = self._held.find(self._head) if self._is_told else -1
        self.is_over = at >= 0
        cut = at if self.is_over else len(self._held) - next(self._overlaps(self._held))
        released = self._held[:cut]
        self._held = "" if self.is_over else self._held[cut:]
        self._released.append(released)
        return released

    def flush(self, *, is_cut: bool) -> str:
        """Return what of the text held is not the suffix's. A text that `is_cut` may go on: only much is left out."""
        held, self._held = self._held, ""
        for num in self._overlaps(held):
            if self._is_repeated(held[: len(held) - num], held[len(held) - num :], is_cut=is_cut):
                self.is_over = True
                return held[: len(held) - num]
        return held

    def _overlaps(self, text: str) -> Iterator[int]:
        """Yield how many characters at the end of a text are the beginning of the head, the most first, down to 0."""
        for num in range(min(len(text), len(self._head)), -1, -1):
            if text.endswith(self._head[:num]):
                yield num

    def _is_repeated(self, before: str, overlap: str, *, is_cut: bool) -> bool:
        if _num_told(overlap) >= _MIN_OVERLAP:
            return True
        if is_cut or not overlap.strip():
            return False
        return overlap == self._word or _closes("".join((*self._released, before)), overlap)


def _head(suffix: str) -> str:
    """Return the first line of a suffix that is not blank, with the line end before it, or the blanks; of short ones
    as many as it takes to be told from others. Empty: there is too little.
    """
    stripped = suffix.lstrip()
    blank = suffix[: len(suffix) - len(stripped)]
    start = max(0, blank.rfind("\n"))
    end = len(blank)
    while _num_told(suffix[start:end]) < _MIN_OVERLAP and end < len(suffix):
        end = suffix.find("\n", end + 1)
        end = len(suffix) if end < 0 else end
    return suffix[start:end].rstrip()[:_MAX_HEAD]


def _num_told(text: str) -> int:
    """Count the characters that are not blank."""
    return sum(not character.isspace() for character in text)


def _closes(text: str, closers: str) -> bool:
    """Whether `closers` are closing brackets, and `text` leaves none open."""
    if not all(closer in _BRACKETS or closer.isspace() for closer in closers):
        return False
    open: list[str] = []
    for character in text:
        if character in _BRACKETS.values():
            open.append(character)
        elif open and _BRACKETS.get(character) == open[-1]:
            open.pop()
    return not open


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one channel, and the tokens whose text is out with it. Tokens of thinking and of tags carry no text."""

    text: str
    tokens: tuple[TextToken, ...] = ()
    channel: Channel = "content"


class Assembler:
    """Runs the stages over one answer, and carries each token to the place where its text comes out.

    `suffix` is what follows the text, if it fills a gap, and `ending` decides where else it is over. `offset` is where
    the answer begins, in characters from the beginning of the text that it joins. Before the text of the first
    `min_tokens` tokens is out, nothing ends it.
    """

    def __init__(
        self,
        *,
        heal: bytes = b"",
        channels: Channels | None = None,
        stops: Sequence[str] = (),
        ending: Ending | None = None,
        suffix: str = "",
        before: str = "",
        offset: int = 0,
        min_tokens: int = 0,
    ) -> None:
        self._heal = Heal(heal)
        self._channels = channels or Channels()
        self._undecided: list[Token] = []
        """Tokens that may still become the opening tag."""
        self._thought = Utf8()
        self._utf8 = Utf8()
        self._stop = Stop(stops, before)
        self._ending = ending
        self._overlap = Overlap(suffix)
        self._waiting: deque[TextToken] = deque()
        self._decoded = offset
        self._released = offset
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens fed so far that have bytes after the seam."""
        self.num_thought = 0
        """Of these: tokens of thinking and of its tags."""

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, if one did."""
        return self._stop.matched

    @property
    def is_over(self) -> bool:
        """Whether the text has come to an end: nothing fed from here on has an effect."""
        is_ended = self._ending is not None and self._ending.is_over
        return self.matched is not None or is_ended or self._overlap.is_over

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._channels.channel == "reasoning"

    def feed(self, token: Token) -> tuple[Piece, ...]:
        """Return what `token` releases, thinking before content."""
        if self.is_over:
            return ()
        data = self._heal.feed(token.data)
        if not data:
            return ()
        self.num_tokens += 1
        token = replace(token, data=data)
        if self._channels.channel == "content":
            return (self._say(token, self.num_tokens),)
        thought, said = self._channels.feed(data)
        self._undecided.append(token)
        if self._channels.channel is None:
            return ()
        tokens, self._undecided = self._undecided, []
        if not self._channels.has_thinking:
            return self._say_all(tokens)
        if said:
            tokens.pop()
        self.num_thought += len(tokens)
        piece = Piece(self._thought.feed(thought), tuple(map(self._silent, tokens)), "reasoning")
        return (piece, self._say(replace(token, data=said), self.num_tokens)) if said else (piece,)

    def flush(self, *, is_cut: bool = False) -> tuple[Piece, ...]:
        """Return what is left at the end of the answer. A cut one may go on: then an unfinished tag is left out."""
        if self.is_thinking:
            return () if is_cut else (Piece(self._thought.feed(self._channels.flush()), (), "reasoning"),)
        if is_cut:
            self._waiting.extend(map(self._silent, self._undecided))
            pieces: tuple[Piece, ...] = ()
        else:
            pieces = self._say_all(self._undecided)
        released = self._utf8.flush() + self._stop.flush()
        if self._ending is not None:
            released = self._ending.feed(released) + self._ending.flush()
        released = self._overlap.feed(released) + self._overlap.flush(is_cut=is_cut)
        self._released += len(released)
        if self.is_over:
            return (*pieces, Piece(released, self._release(is_end=True)))
        tokens = tuple(self._waiting)
        self._waiting.clear()
        return (*pieces, Piece(released, tokens))

    def _say_all(self, tokens: Sequence[Token]) -> tuple[Piece, ...]:
        """Return content that the last tokens release."""
        first = self.num_tokens - len(tokens) + 1
        return tuple(self._say(token, index) for index, token in enumerate(tokens, first))

    def _say(self, token: Token, index: int) -> Piece:
        """Return content that the `index`-th token releases, and the tokens whose text is now out."""
        text = self._utf8.feed(token.data)
        self._waiting.append(TextToken(token.id, text, token.data, self._decoded, token.logprob, token.top))
        self._decoded += len(text)
        can_end = index > self._min_tokens
        released = self._stop.feed(text, can_end=can_end)
        if can_end:
            released = self._overlap.feed(self._ending.feed(released) if self._ending else released)
        self._released += len(released)
        return Piece(released, self._release())

    def _silent(self, token: Token) -> TextToken:
        return TextToken(token.id, "", token.data, self._decoded, token.logprob, token.top)

    def _release(self, *, is_end: bool = False) -> tuple[TextToken, ...]:
        tokens = []
        while self._waiting:
            token = self._waiting[0]
            end = token.offset + len(token.text)
            if token.offset >= self._released or (end > self._released and not is_end):
                break
            if end > self._released:
                token = replace(token, text=token.text[: self._released - token.offset])
            tokens.append(token)
            self._waiting.popleft()
        return tuple(tokens)
