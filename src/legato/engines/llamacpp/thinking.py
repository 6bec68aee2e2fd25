"""When a Job's thinking has been long enough: the closing tag is then written in the model's place.

It receives the tokens of a Job so far and says which one must come next. It keeps nothing of them, so that the answer
is the same for a text that is written in one go, resumed, or tried at a seam. The tag is put where the tokenizer would
cut the text before it, so that the text, sent again, is the same tokens; if there is no such place soon, anywhere.

A model that ends its answer while it thinks has not answered: there too the tag is written, and the answer follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from legato.decoding.seam import Seam, is_whole
from legato.text.assembler import Channels
from legato.types import Job

__all__ = ["Budget"]


class Budget:
    """The thinking of one Job. `is_over` once nothing more will be forced."""

    def __init__(self, job: Job, pieces: Sequence[bytes], seam: Seam) -> None:
        self._job = job
        self._seam = seam
        self._pieces = pieces
        self._close_ids = job.thinking.close_ids if job.thinking else ()
        self._max_tokens = job.thinking.max_tokens if job.thinking else None
        self._max_delay = job.thinking.max_delay if job.thinking else 0
        self.is_over = self._max_tokens is None

    def forced(self, tokens: Sequence[int]) -> int | None:
        """Return the token that must follow, of the closing tag; None: the model chooses."""
        turn = self._job.prompt.turn
        if self.is_over or self._max_tokens is None or len(tokens) < turn + self._max_tokens:
            return None
        channels = Channels.of(self._job, self._pieces, is_begun=False)
        num_thought = 0
        for index in range(turn, len(tokens) + 1):
            if channels.channel == "content":
                break
            if channels.channel == "reasoning":
                num_late = num_thought - self._max_tokens
                if num_late >= 0 and self._can_close(tokens[:index], num_late):
                    num_forced = len(tokens) - index
                    if num_forced < len(self._close_ids):
                        return self._close_ids[num_forced]
                    break
                num_thought += 1
            if index == len(tokens):
                return None
            channels.feed(self._pieces[tokens[index]])
        self.is_over = True
        return None

    def closing(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return what stands in the place of the model's end behind the tokens: the closing tag, or the rest of one of
        which a part stands there; nothing if nobody thinks there, so that the end is one.
        """
        job = self._job
        if job.thinking is None:
            return ()
        channels = Channels.of(job, self._pieces, is_begun=False)
        for token in tokens[job.prompt.turn :]:
            channels.feed(self._pieces[token])
        if channels.channel != "reasoning":
            return ()
        num = len(self._close_ids) - 1
        while num and tuple(tokens[len(tokens) - num :]) != self._close_ids[:num]:
            num -= 1
        return self._close_ids[num:]

    def _can_close(self, tokens: Sequence[int], num_late: int) -> bool:
        """Whether the closing tag can stand behind the tokens."""
        if not is_whole(b"".join(self._pieces[id] for id in tokens[-4:])):
            return False
        return num_late >= self._max_delay or self._seam.is_canonical(
            tokens, self._job.prompt.floor, self._close_ids[0]
        )
