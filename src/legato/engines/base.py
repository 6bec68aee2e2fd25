"""What every engine offers.

Contract, held by `tests/contract`: the first Step of a Job has no tokens and means that it was accepted and its
prompt fits; closing the iterator frees the work within one decode step, also while it waits or reads the prompt;
every accepted Job ends in exactly one finish, error or cancellation; the bytes of a Job's tokens, joined, are its
heal bytes and the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from legato.decoding.seam import Seam
from legato.prompting.profiles import Profile
from legato.types import Capabilities, Job, Step, Tokenizer

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs Jobs for one model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, usable in this process."""

    @property
    def seam(self) -> Seam:
        """The seam of that tokenizer."""

    @property
    def profile(self) -> Profile:
        """What is known about the model."""

    @property
    def capabilities(self) -> Capabilities:
        """What a Job may ask for."""

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job. Close the iterator to cancel.

        Raises:
            EngineUnavailable: the engine does not run.
            GenerationFailed: an accepted Job could not be finished.
        """

    def counters(self) -> Mapping[str, int]:
        """Return the engine's own counts.

        `running`: Jobs that hold a place in it now. Where they exist: `restarts`, how often it had to be started again;
        `down`, whether it does not run now; `failed`, whether that has been so for too long to wait for it.
        """

    async def aclose(self) -> None:
        """Cancel what runs and free everything."""
