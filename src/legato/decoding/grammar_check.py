"""Trying a caller's constraint where it can do no harm: in a process of its own, within a time and a memory.

It receives constraints and prefixes and returns grammars, or says what is wrong. A schema or a pattern can take its
compiler arbitrarily long; then the process is killed, and the next constraint gets another one. Only what a constraint
itself costs counts against it: whatever else goes wrong is told as the server's own trouble.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from legato.errors import InvalidField, Overloaded
from legato.system.signals import blocked_in_children
from legato.types import ConstraintOptions

__all__ = ["Allowance", "Checker", "Child"]

_log = logging.getLogger("legato.decoding.grammar_check")

_LIMIT_S = 2.0
"""Processor time for one constraint."""
_LIMIT_ALL_S = 6.0
"""The same for all of one request, which has one for each prompt."""
_MAX_CHILDREN = 3
_MAX_WAIT_S = 5.0
"""So long a constraint waits for a free process."""
_START_S = 10.0
_ANSWER_S = 15.0
"""So long a process may take to answer, however little of the processor it gets."""
_STILL_S = 3.0
"""So long it may take without computing at all: it is stopped, or waits for what never comes."""
_LOOK_S = 0.1
_END_S = 2.0
_MAX_REMEMBERED = 256


class Child:
    """A process that tries constraints, and a socket to it: all that is not in our hands.

    Raises:
        OSError: there is no memory for it, or no descriptor.
    """

    def __init__(self, program: Sequence[str] = (sys.executable, "-m", "legato.decoding.grammar")) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, blocked_in_children():
                end = theirs.fileno()
                self._process = subprocess.Popen(program, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        self.pid = self._process.pid

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of it."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)

    def receive(self, timeout_s: float) -> bytes:
        """Receive something; nothing at the end.

        Raises:
            TimeoutError: nothing came.
        """
        self._socket.settimeout(timeout_s)
        return self._socket.recv(1 << 16)

    def computed_s(self) -> float:
        """Return the processor time that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """Close the socket, upon which it ends by itself."""
        self._socket.close()


class _TooLong(Exception):
    """A question takes longer than it may."""


@dataclass(eq=False)
class Allowance:
    """Processor time that the constraints of one request have left."""

    seconds: float = _LIMIT_ALL_S


class Checker:
    """Tries constraints, a few at a time. A process is started when there is none that is free.

    `start` starts one.
    """

    def __init__(self, start: Callable[[], Child] = Child) -> None:
        self._start = start
        self._places = threading.BoundedSemaphore(_MAX_CHILDREN)
        self._lock = threading.Lock()
        self._idle: list[_Trier] = []
        self._busy: set[_Trier] = set()
        self._too_complex: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of questions that took too long: who asks again need not wait again."""
        self._is_closed = False

    def check(
        self,
        options: ConstraintOptions,
        prefix: str,
        *,
        lead: str = "",
        num_before: int = 0,
        is_after_thinking: bool = False,
        allowance: Allowance | None = None,
    ) -> str:
        """Return a constraint's grammar (`constraint.grammar`). Takes seconds at most; call it in a thread.

        Args:
            options: the constraint, as asked.
            prefix: the beginning of the constrained text.
            lead: what the grammar's text has before the constrained one.
            num_before: bytes before the constrained text, which an error's offset counts.
            is_after_thinking: the text comes right behind thinking.
            allowance: what its request has left; what it takes is taken off.

        Raises:
            InvalidField: the constraint is wrong, or is too complex, or no text that it allows begins with the prefix.
            Overloaded: it could not be tried.
        """
        question = {"lead": lead, "prefix": prefix, "is_after_thinking": is_after_thinking}
        field = options.field
        line = json.dumps({"options": asdict(options), **question}).encode() + b"\n"
        verdict = self._ask(line, allowance or Allowance())
        if verdict is None:
            raise InvalidField(
                f"`{field}` is too complex: it could not be compiled within {_LIMIT_S:g} seconds and 2 GiB, or within "
                f"{_LIMIT_ALL_S:g} seconds for all prompts of the request",
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
        """End the processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = [*self._busy]
        for trier in busy:  # Whoever uses it ends it.
            trier.kill()
        for trier in idle:
            trier.end()

    def _ask(self, line: bytes, allowance: Allowance) -> dict[str, Any] | None:
        """Return the verdict; None: it takes too long, or too much memory."""
        name = blake2b(line, digest_size=16).digest()
        if not self._places.acquire(timeout=_MAX_WAIT_S):
            raise _busy()
        try:
            if name in self._too_complex:
                return None
            # One that was used may be full of what others have asked, or dead: then a new one is asked.
            for may_be_used in (True, False):
                with self._taken(may_be_used=may_be_used) as trier:
                    is_new = not trier.num_asked
                    try:
                        return trier.ask(line, allowance)
                    except _TooLong:
                        break
                    except (OSError, EOFError, ValueError) as error:
                        if is_new and trier.has_failed_itself():
                            break
                        _log.warning("process %d, which tries constraints, is of no use: %r", trier.pid, error)
            else:
                raise _busy()
            with self._lock:
                self._too_complex[name] = None
                if len(self._too_complex) > _MAX_REMEMBERED:
                    self._too_complex.popitem(last=False)
            return None
        finally:
            self._places.release()

    @contextmanager
    def _taken(self, *, may_be_used: bool) -> Iterator[_Trier]:
        """Take a process that is free, if it may be one that was used, or a new one. If it answers, it is kept."""
        with self._lock:
            if self._is_closed:
                raise _busy()
            trier = self._idle.pop() if self._idle and may_be_used else None
        if trier is None:
            try:
                trier = _Trier(self._start())
            except OSError as error:
                _log.error("no process can be started to try constraints: %s", error.strerror or error)
                raise _busy() from None
        with self._lock:
            self._busy.add(trier)
        try:
            yield trier
        finally:
            with self._lock:
                self._busy.discard(trier)
                is_kept = trier.is_free and not self._is_closed
                if is_kept:
                    self._idle.append(trier)
            if not is_kept:
                trier.end()


class _Trier:
    """A process, one question at a time."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._received = b""
        self._is_ready = False
        self.is_free = False
        """Whether it has answered all that it was asked."""
        self.num_asked = 0
        self.pid = child.pid

    def ask(self, line: bytes, allowance: Allowance) -> dict[str, Any]:
        """Return the verdict.

        Raises:
            _TooLong: it takes more of the processor than it may.
            Overloaded: it does not get that much.
            OSError, EOFError, ValueError: the process is dead, hangs, or says nonsense.
        """
        self.is_free = False
        if not self._is_ready:
            self._read_line(_START_S, float("inf"))
            self._is_ready = True
        before_s = self._child.computed_s()
        self._child.send(line, _STILL_S)
        try:
            verdict: dict[str, Any] = json.loads(
                self._read_line(_ANSWER_S, before_s + min(_LIMIT_S, allowance.seconds))
            )
        finally:
            with suppress(OSError):
                allowance.seconds -= self._child.computed_s() - before_s
        self.num_asked += 1
        self.is_free = True
        return verdict

    def _read_line(self, timeout_s: float, limit_s: float) -> bytes:
        now = moved_at = time.monotonic()
        until, seen_s = now + timeout_s, 0.0
        while b"\n" not in self._received:
            try:
                data = self._child.receive(_LOOK_S)
            except TimeoutError:
                now, before_s, seen_s = time.monotonic(), seen_s, self._child.computed_s()
                moved_at = now if seen_s != before_s else moved_at
                if seen_s > limit_s:
                    raise _TooLong from None
                if now > until:
                    raise _busy() from None
                if now > moved_at + _STILL_S:
                    raise
                continue
            if not data:
                raise EOFError("it has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def has_failed_itself(self) -> bool:
        """Whether it was ended by what it was asked: for want of memory, or of room on its stack."""
        try:
            return self._is_ready and self._child.wait(_END_S) not in (0, -signal.SIGKILL, -signal.SIGTERM)
        except (OSError, subprocess.TimeoutExpired):
            return False

    def kill(self) -> None:
        """End it soon."""
        self._try(self._child.kill)

    def end(self) -> None:
        """End it now."""
        self._try(self._child.close)
        for _ in range(2):
            self._try(self._child.kill)
            if self._try(lambda: self._child.wait(_END_S)):
                break

    def _try(self, step: Callable[[], object]) -> bool:
        try:
            step()
            return True
        except Exception as error:  # noqa: BLE001 - without its socket it ends by itself
            _log.error("process %d, which tries constraints, cannot be ended: %r", self.pid, error)
            return False


def _busy() -> Overloaded:
    return Overloaded("the server is busy, and could not try the constraint; try again in 5 s", retry_after_s=5)
