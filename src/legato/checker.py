"""Trying a caller's constraint where it can do no harm: in a process of its own, within a time and a memory.

It receives constraints and prefixes and returns grammars, or says what is wrong. A schema or a pattern can take its
compiler arbitrarily long; then the process is killed, and the next constraint gets another one.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from legato.errors import InvalidField
from legato.signals import blocked_in_children
from legato.types import ConstraintOptions

__all__ = ["Checker"]

_DEADLINE_S = 2.0
_START_S = 10.0
_MAX_WAIT_S = 20.0


class Checker:
    """Tries constraints, one at a time. The process is started with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(
        self,
        options: ConstraintOptions,
        prefix: str,
        *,
        lead: str = "",
        num_before: int = 0,
        is_after_thinking: bool = False,
    ) -> str:
        """Return a constraint's grammar (`constraint.grammar`). Takes seconds at most; call it in a thread.

        Args:
            options: the constraint, as asked.
            prefix: the beginning of the constrained text.
            lead: what the grammar's text has before the constrained one.
            num_before: bytes before the constrained text, which an error's offset counts.
            is_after_thinking: the text comes right behind thinking.

        Raises:
            InvalidField: the constraint is wrong, or is too complex, or no text that it allows begins with the prefix.
        """
        question = {"lead": lead, "prefix": prefix, "is_after_thinking": is_after_thinking}
        field = options.field
        verdict = self._ask(json.dumps({"options": asdict(options), **question}))
        if verdict is None:
            raise InvalidField(
                f"`{field}` is too complex: it could not be compiled within {_DEADLINE_S:g} seconds and 2 GiB",
                param=field,
            )
        if "reason" in verdict:
            raise InvalidField(f"`{field}` cannot be used: {verdict['reason']}", param=field)
        if "offset" in verdict:
            at = verdict["offset"]
            found = prefix.encode()[at : at + 16].decode("utf-8", "replace")
            raise InvalidField(
                f"`{field}` does not allow the text to be continued: at byte {num_before + at} of it stands {found!r}, "
                f"where {verdict['follows']} could",
                param=field,
            )
        grammar: str = verdict["grammar"]
        return grammar

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _ask(self, question: str) -> dict[str, Any] | None:
        """Return the verdict; None: it took too long, or too much."""
        if not self._lock.acquire(timeout=_MAX_WAIT_S):
            return None
        try:
            process = self._process = self._process or _start()
            assert process.stdin is not None
            try:
                process.stdin.write(question + "\n")
                process.stdin.flush()
                answer = _read(process, _DEADLINE_S)
            except BrokenPipeError:
                answer = ""
            if not answer:
                self._kill()
                return None
            verdict: dict[str, Any] = json.loads(answer)
            return verdict
        finally:
            self._lock.release()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()


def _start() -> subprocess.Popen[str]:
    with blocked_in_children():
        process = subprocess.Popen(
            [sys.executable, "-m", "legato.constraint"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    _read(process, _START_S)
    return process


def _read(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Return the next line; empty if there is none in time."""
    assert process.stdout is not None
    is_there, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if is_there else ""
