"""From the bytes that an engine writes to the text that a caller reads: heal bytes removed, UTF-8 whole, stops cut.

It receives `Token`s in order and returns text with the tokens that carry it. It does no I/O, and does not know
engines, prompts or dialects.

Three stages, each with `feed` and `flush`, none aware of the others:

    Heal   drops the bytes that the prefix already has
    Utf8   holds the bytes of an unfinished character
    Stop   holds text that may still become a stop, and ends at the first stop that completes

`Assembler` runs them token by token. What it returns does not depend on how the bytes were cut into tokens or the
tokens into steps: text that was released is never taken back, and an unfinished character at the very end is left
out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from legato.errors import GenerationFailed
from legato.types import TextToken, Token

__all__ = ["Assembler", "Heal", "Stop", "Utf8"]


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


class Assembler:
    """Runs the three stages over one answer, and carries each token to the place where its text comes out.

    `offset` is where the answer begins, in characters from the beginning of the text that it joins. No stop completes
    in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self, *, heal: bytes = b"", stops: Sequence[str] = (), before: str = "", offset: int = 0, min_tokens: int = 0
    ) -> None:
        self._heal = Heal(heal)
        self._utf8 = Utf8()
        self._stop = Stop(stops, before)
        self._waiting: deque[TextToken] = deque()
        self._decoded = offset
        self._released = offset
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens fed so far that have bytes after the seam."""

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, if one did; nothing fed after it has an effect."""
        return self._stop.matched

    def feed(self, token: Token) -> tuple[str, tuple[TextToken, ...]]:
        """Return the text that `token` releases and the tokens whose text is now out."""
        if self.matched is not None:
            return "", ()
        data = self._heal.feed(token.data)
        if not data:
            return "", ()
        self.num_tokens += 1
        text = self._utf8.feed(data)
        self._waiting.append(TextToken(token.id, text, data, self._decoded, token.logprob, token.top))
        self._decoded += len(text)
        released = self._stop.feed(text, can_end=self.num_tokens > self._min_tokens)
        self._released += len(released)
        return released, self._release()

    def flush(self) -> tuple[str, tuple[TextToken, ...]]:
        """Return what is left at the end of the answer."""
        released = self._utf8.flush() + self._stop.flush()
        self._released += len(released)
        if self.matched is not None:
            return released, ()
        tokens = tuple(self._waiting)
        self._waiting.clear()
        return released, tokens

    def _release(self) -> tuple[TextToken, ...]:
        tokens = []
        while self._waiting:
            token = self._waiting[0]
            end = token.offset + len(token.text)
            if token.offset >= self._released or (end > self._released and self.matched is None):
                break
            if end > self._released:
                token = replace(token, text=token.text[: self._released - token.offset])
            tokens.append(token)
            self._waiting.popleft()
        return tuple(tokens)
