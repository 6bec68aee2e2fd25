"""An engine that plays a script: chunks of bytes, delays and faults. For demonstrations and tests, without weights.

Its tokenizer has one token per byte, and one control token that ends an answer; its vocabulary needs no healing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from legato.decoding.seam import Seam
from legato.errors import GenerationFailed
from legato.prompting.profiles import Profile
from legato.types import Capabilities, Job, Step, Token

__all__ = ["DEMO", "ByteTokenizer", "Fault", "Pause", "Script", "ScriptedEngine"]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long before the next chunk."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Fail here."""

    message: str = "the script says so"


Script = Sequence[bytes | Pause | Fault]

_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

DEMO: Script = tuple(
    part
    for word in b"This is the scripted engine: it plays a fixed text, word by word, and loads no model.".split(b" ")
    for part in (b" " + word, Pause(0.05))
)
"""What `legato serve --demo` plays."""


class ByteTokenizer:
    """One id per byte; id 256 ends an answer."""

    pieces: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
    control_ids = frozenset([256])
    end_ids = frozenset([256])
    start_id: int | None = None

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """Return the bytes as ids; `<|end|>` is one id if `special`."""
        if not special:
            return list(data)
        ids: list[int] = []
        for index, part in enumerate(data.split(b"<|end|>")):
            ids += ([256] if index else []) + list(part)
        return ids


class ScriptedEngine:
    """Plays `script(job)` for each Job, a Step per chunk, a token per byte."""

    capabilities = Capabilities(
        logprobs=False,
        score_prompt=False,
        canonical=False,
        keyed_noise=False,
        ends=False,
        thinking=False,
        constraints=False,
    )

    def __init__(self, script: Script | Callable[[Job], Script] = DEMO, *, context_length: int = 4096) -> None:
        self._script = script
        self.tokenizer = ByteTokenizer()
        self.seam = Seam(self.tokenizer)
        self.profile = Profile(context_length=context_length, chat_template=_TEMPLATE)
        self._num_running = 0
        self.num_cancelled = 0

    async def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Play the script, up to the Job's limit of tokens."""
        script = self._script(job) if callable(self._script) else self._script
        left = job.max_tokens
        self._num_running += 1
        is_over = False
        try:
            yield Step()
            for part in script:
                match part:
                    case Pause(seconds):
                        await asyncio.sleep(seconds)
                    case Fault(message):
                        is_over = True
                        raise GenerationFailed(message)
                    case bytes():
                        tokens = tuple(Token(byte, bytes([byte])) for byte in part[:left])
                        left -= len(tokens)
                        is_over = left == 0
                        yield Step(tokens, finish="length" if is_over else None)
                        if is_over:
                            return
                        await asyncio.sleep(0)
            is_over = True
            yield Step(finish="stop")
        finally:
            self._num_running -= 1
            self.num_cancelled += not is_over

    def counters(self) -> Mapping[str, int]:
        """Return how many Jobs run and how many were cancelled."""
        return {"running": self._num_running, "cancelled": self.num_cancelled}

    async def aclose(self) -> None:
        """Nothing to free."""
