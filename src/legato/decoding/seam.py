"""Where a prompt is cut, and what may stand at the cut.

It receives a tokenizer's vocabulary and bytes, and answers three questions: where must the engine begin to write
again (`Seam.split`), is a token what the tokenizer would have put there (`Seam.is_canonical`), and which token
sequences cover the bytes after the cut (`Seam.inners`, `best_cover`). It knows no model and no engine; logits come in
as plain arrays.

Theory. A tokenizer cuts a prefix where the text ends, not where a token would have ended. So the prompt is given up
from the earliest place from which one token could reach beyond the end of the text; the bytes after it are the *heal
bytes*, and the engine writes them again:

    replay      let the model choose as it would without a constraint. If its choices agree with the heal bytes until
                they are covered, this is what an uncut run would have written.
    condition   otherwise score every *cover*: an inner path of whole tokens inside the heal bytes, then one last token
                that reaches their end or beyond it, the whole of it canonical. Take the likeliest, by noisy score when
                sampling.

Together they sample the model's distribution given the prefix's bytes (Phan et al. 2410.09303, Hayase et al.
2506.14123): with B the event that the heal bytes are written, a cover c comes with P(c) by replay and with (1 - P(B))
P(c | B) otherwise, in sum P(c | B).

A token is accepted only if the tokenizer would give it back for the text so far (Chatzi et al. 2506.06446): otherwise
the text, sent again, would be another sequence of tokens and go on differently.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.types import Tokenizer

__all__ = ["Inner", "ScoredInner", "Seam", "best_cover", "is_whole"]

_WINDOW = 10
"""Tokens before a new one that the canonical check re-encodes at first."""
_MAX_WINDOW = 64
"""A window that does not re-encode to itself is widened up to this."""
_CONTEXT = 8
"""Kept tokens that are looked at again when what follows may change them."""
_MAX_TRIED = 32
"""Tokens tried to find one that is canonical at a place."""
_MAX_CHECKS = 256
"""Covers looked at before the canonical spelling of the heal bytes is taken as it is."""


def is_whole(data: bytes) -> bool:
    """Whether `data` ends at the end of a character: its last UTF-8 sequence is not cut short."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True


def _is_start(data: bytes) -> bool:
    return not data or not 0x80 <= data[0] < 0xC0


@dataclass(frozen=True, slots=True)
class Inner:
    """Whole tokens inside the heal bytes; the cover's last token must begin with `rest`."""

    ids: tuple[int, ...]
    rest: bytes


@dataclass(frozen=True, slots=True)
class ScoredInner:
    """An inner path with its joint log-probability, and the log-probabilities of what follows it."""

    inner: Inner
    logprob: float
    row: NDArray[np.float64]
    noise: Callable[[NDArray[np.int64]], NDArray[np.float64]] | None
    """Noise for the last token, by id; None when greedy."""


class Seam:
    """The vocabulary, sorted, with the tokenizer it belongs to. Build one per tokenizer: it takes about 0.1 s."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        control = tokenizer.control_ids
        words = sorted((piece, id) for id, piece in enumerate(tokenizer.pieces) if piece and id not in control)
        self._words = [piece for piece, _ in words]
        self._ids = np.array([id for _, id in words], np.int64)
        self._max_bytes = max(map(len, self._words), default=0)

    # -- the boundary -------------------------------------------------------------------------------------------------

    def boundary(self, data: bytes) -> int:
        """Return the earliest offset from which `data` to its end is a proper prefix of some token."""
        for start in range(max(0, len(data) - self._max_bytes + 1), len(data)):
            tail = data[start:]
            at = bisect_left(self._words, tail)
            while at < len(self._words) and self._words[at] == tail:
                at += 1
            if at < len(self._words) and self._words[at].startswith(tail):
                return start
        return len(data)

    def split(self, ids: Sequence[int], floor: int) -> tuple[int, bytes]:
        """Cut canonical `ids`, of which the first `floor` are scaffold, at the seam.

        Returns the number of ids to keep, at least `floor`, and the bytes of the rest: the heal bytes.
        """
        pieces = self._tokenizer.pieces
        text = b"".join(pieces[id] for id in ids[floor:])
        boundary = self.boundary(text)
        kept = len(ids)
        end = len(text)
        while kept > floor and end > boundary:
            kept -= 1
            end -= len(pieces[ids[kept]])
        kept = self._stable(ids, floor, kept)
        return kept, b"".join(pieces[id] for id in ids[kept:])

    def _stable(self, ids: Sequence[int], floor: int, kept: int) -> int:
        """Return how many of the kept ids stand whatever follows.

        What follows may change how the text before it is cut: `nana` is `n` `ana`, and `nanad` is `nan` `ad`. So for
        every place inside the heal bytes at which the overhanging token could begin, what the tokenizer makes of the
        text before that place must begin with the kept ids, unless no token there would be canonical.
        """
        pieces = self._tokenizer.pieces
        start = max(floor, kept - _CONTEXT)
        data = b"".join(pieces[id] for id in ids[start:])
        heal_from = sum(len(pieces[id]) for id in ids[start:kept])
        for at in range(heal_from + 1, len(data)):
            if kept == start or not is_whole(data[:at]) or not self._range(data[at:])[1]:
                continue
            inner = self._encode(data[:at])
            same = 0
            while same < min(len(inner), kept - start) and inner[same] == ids[start + same]:
                same += 1
            if start + same < kept and self._is_viable(inner, data[at:]):
                kept = start + same
        return kept

    def _is_viable(self, inner: Sequence[int], rest: bytes) -> bool:
        """Whether a token that begins with `rest` is canonical behind `inner`, among a spread of such tokens."""
        some = self.candidates(rest)
        return any(self.is_canonical(inner, 0, int(id)) for id in some[:: len(some) // _MAX_TRIED + 1])

    # -- canonical tokens ---------------------------------------------------------------------------------------------

    def is_canonical(self, context: Sequence[int], floor: int, token: int) -> bool:
        """Whether re-encoding the last tokens of `context` with `token` gives them back.

        No token before `floor` is looked at. Inside an unfinished character the answer is True: the check waits for
        its end. So it is for a control token, which is not cut from text.
        """
        pieces = self._tokenizer.pieces
        if token in self._tokenizer.control_ids or not self._completes(context, token):
            return True
        num = _WINDOW
        while True:
            window, data = self._window(context, floor, num)
            if self._encode(data + pieces[token]) == [*window, token]:
                return True
            at_limit = num >= _MAX_WINDOW or len(context) - floor <= num
            if self._is_stable(window) and (at_limit or self._is_apart(window)):
                return False
            if at_limit:
                break
            num *= 2
        # The context itself is not canonical (a forced token): judge by the longest tail of it that is.
        while num > 1:
            num //= 2
            window, data = self._window(context, floor, num)
            if self._is_stable(window):
                return self._encode(data + pieces[token]) == [*window, token]
        return True

    def encode_after(self, context: Sequence[int], floor: int, data: bytes) -> list[int]:
        """Encode `data` as it is encoded behind `context`."""
        num = _WINDOW
        while num:
            window, before = self._window(context, floor, num)
            ids = self._encode(before + data)
            if ids[: len(window)] == window:
                return ids[len(window) :]
            num //= 2
        return self._encode(data)

    def _encode(self, data: bytes) -> list[int]:
        return self._tokenizer.encode(data, special=False)

    def _is_stable(self, window: Sequence[int]) -> bool:
        """Whether the window's tokens, up to the last whole character, are what their text encodes to."""
        pieces = self._tokenizer.pieces
        num = len(window)
        while num and not self._completes(window[: num - 1], window[num - 1]):
            num -= 1
        return self._encode(b"".join(pieces[id] for id in window[:num])) == list(window[:num])

    def _is_apart(self, window: Sequence[int]) -> bool:
        """Whether the window begins at a place where words are cut: then what stands before it has no say."""
        first = self._tokenizer.pieces[window[0]] if window else b" "
        return first[:1] in b" \n\t\r"

    def _completes(self, context: Sequence[int], token: int) -> bool:
        """Whether `token`, seen with the tokens before it, ends at the end of a character."""
        pieces = self._tokenizer.pieces
        data = pieces[token]
        for id in reversed(context[-4:]):
            if _is_start(data):
                break
            data = pieces[id] + data
        return is_whole(data)

    def _window(self, context: Sequence[int], floor: int, num: int) -> tuple[list[int], bytes]:
        """Return the last `num` ids of the context, or a few more to begin at a character, and their bytes."""
        pieces = self._tokenizer.pieces
        start = max(floor, len(context) - num)
        while start > floor and not _is_start(pieces[context[start]]):
            start -= 1
        window = list(context[start:])
        return window, b"".join(pieces[id] for id in window)

    # -- covers -------------------------------------------------------------------------------------------------------

    def inners(self, context: Sequence[int], floor: int, heal: bytes, spelling: Sequence[int]) -> list[Inner]:
        """Return every inner path of the heal bytes: one per place at which a last token could begin.

        `spelling` is the canonical encoding of the heal bytes; its own borders are places too, also inside a character.
        """
        pieces = self._tokenizer.pieces
        paths: dict[bytes, tuple[int, ...]] = {}
        done = b""
        for num, id in enumerate(spelling):
            paths[done] = tuple(spelling[:num])
            done += pieces[id]
        for at in range(1, len(heal)):
            head = heal[:at]
            if head not in paths and is_whole(head):
                ids = self.encode_after(context, floor, head)
                if b"".join(pieces[id] for id in ids) == head:
                    paths[head] = tuple(ids)
        return [Inner(ids, heal[len(head) :]) for head, ids in paths.items() if self._range(heal[len(head) :])[1]]

    def candidates(self, rest: bytes) -> NDArray[np.int64]:
        """Return the ids of all tokens that begin with `rest`."""
        low, num = self._range(rest)
        return self._ids[low : low + num]

    def _range(self, rest: bytes) -> tuple[int, int]:
        low = bisect_left(self._words, rest)
        bound = rest.rstrip(b"\xff")
        if not bound:
            return low, len(self._words) - low
        high = bisect_left(self._words, bound[:-1] + bytes([bound[-1] + 1]))
        return low, high - low


def best_cover(
    seam: Seam, context: Sequence[int], floor: int, scored: Sequence[ScoredInner], spelling: Sequence[int]
) -> tuple[tuple[int, ...], float]:
    """Return the canonical cover with the highest joint log-probability plus noise, and that score.

    `spelling`, the canonical encoding of the heal bytes, is a cover itself and is returned if no other is found
    (score -inf).
    """
    ids = [seam.candidates(entry.inner.rest) for entry in scored]
    scores = []
    for entry, some in zip(scored, ids, strict=True):
        score = entry.logprob + entry.row[some]
        scores.append(score if entry.noise is None else score + entry.noise(some))
    for _ in range(_MAX_CHECKS):
        tops = [float(score.max()) if score.size else -np.inf for score in scores]
        which = int(np.argmax(tops))
        if tops[which] == -np.inf:
            break
        at = int(scores[which].argmax())
        inner = scored[which].inner.ids
        token = int(ids[which][at])
        if seam.is_canonical([*context, *inner], floor, token):
            return (*inner, token), tops[which]
        scores[which][at] = -np.inf
    return tuple(spelling), -np.inf
