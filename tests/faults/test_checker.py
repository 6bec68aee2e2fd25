"""The processes that try constraints fail at every moment: nobody hangs, and only what is too complex is told so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from legato.decoding.grammar_check import Allowance, Checker, Child
from legato.errors import InvalidField, Overloaded
from legato.types import ConstraintOptions
from tests.conftest import children
from tests.faults import HANGS_AFTER_S, Faults, tried

PROGRAM = (sys.executable, str(Path(__file__).with_name("trier.py")))


class Unreliable(Child):
    """A process at which calls fail."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        faults.call("start")
        super().__init__(PROGRAM)

    def send(self, data: bytes, timeout_s: float) -> None:
        self._faults.call("send")
        super().send(data, timeout_s)

    def receive(self, timeout_s: float) -> bytes:
        self._faults.call("receive")
        return super().receive(timeout_s)

    def computed_s(self) -> float:
        self._faults.call("computed_s")
        return super().computed_s()

    def kill(self) -> None:
        self._faults.call("kill")
        super().kill()

    def wait(self, timeout_s: float) -> int:
        self._faults.call("wait")
        return super().wait(timeout_s)

    def close(self) -> None:
        super().close()
        self._faults.call("close")


def try_text(checker: Checker, text: str, allowance: Allowance | None = None) -> str:
    """Try a constraint of this text; say what became of it."""
    begun = time.monotonic()
    try:
        assert checker.check(ConstraintOptions("regex", text, "f"), "", allowance=allowance) == text
        return "right"
    except InvalidField:
        return "too complex"
    except Overloaded:
        return "busy"
    finally:
        assert time.monotonic() - begun < HANGS_AFTER_S


@contextmanager
def checking(start: Callable[[], Child] = lambda: Child(PROGRAM)) -> Iterator[Checker]:
    """A checker, and an end to it that leaves no process."""
    before = {*children(os.getpid())}
    checker = Checker(start)
    try:
        yield checker
    finally:
        begun = time.monotonic()
        checker.close()
        assert time.monotonic() - begun < HANGS_AFTER_S
    deadline = time.monotonic() + HANGS_AFTER_S
    while {*children(os.getpid())} - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def scenario(faults: Faults) -> None:
    """Some that are right, at once and one after the other, one that ends its process, and others after it."""
    with checking(lambda: Unreliable(faults)) as checker:
        with ThreadPoolExecutor(2) as threads:
            said = [*threads.map(lambda text: try_text(checker, text), "abcd")]
        ended = try_text(checker, "ends")
        assert ended == "too complex" or (ended == "busy" and faults.has_failed)
        said += [try_text(checker, text) for text in "ef"]
        assert said.count("busy") <= faults.has_failed
        assert {*said} <= {"right", "busy"}
        assert try_text(checker, "last") == "right" or faults.calls["close"] > 4


ERRORS: Mapping[str, tuple[Callable[[], BaseException], ...]] = {
    "start": (lambda: OSError(12, "Cannot allocate memory"),),
    "send": (BrokenPipeError, TimeoutError),
    "receive": (ConnectionResetError, EOFError),
    "computed_s": (FileNotFoundError, ValueError),
    "kill": (lambda: PermissionError(1, "Operation not permitted"),),
    "wait": (lambda: subprocess.TimeoutExpired("it", 1),),
    "close": (lambda: OSError(5, "Input/output error"),),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_call_fails_at_every_moment(kind: str) -> None:
    counted = Faults()
    scenario(counted)
    assert counted.calls[kind]
    for n in range(1, counted.calls[kind] + 1):
        for error in ERRORS[kind]:
            scenario(Faults(f"checker: {kind}", kind, n, error))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ends", "too complex"),
        ("ends if it is full", "right"),
        ("stops if it is full", "right"),
        ("stops", "busy"),
        ("is killed", "busy"),
        ("says nonsense", "busy"),
        ("breaks off", "busy"),
        ("computes", "too complex"),
        ("computes for a second", "right"),
    ],
)
def test_what_becomes_of_a_process_and_of_its_constraint(text: str, said: str) -> None:
    """Only what a constraint itself does to a process that nobody used before counts against it."""
    tried[f"checker: a process {text}"] += 1
    with checking() as checker:
        assert try_text(checker, "a") == "right"
        assert try_text(checker, text) == said
        assert try_text(checker, "b") == "right"


def test_a_process_that_cannot_begin_is_nobodys_fault() -> None:
    tried["checker: a process leaves at once"] += 1
    programs = [(*PROGRAM, "leaves at once"), (*PROGRAM, "leaves at once"), PROGRAM]
    with checking(lambda: Child(programs.pop(0))) as checker:
        assert [try_text(checker, text) for text in "ab"] == ["busy", "right"]


@pytest.mark.alone
def test_what_was_too_complex_is_so_at_once() -> None:
    with checking() as checker:
        assert try_text(checker, "computes") == "too complex"
        begun = time.monotonic()
        assert try_text(checker, "computes") == "too complex"
        assert time.monotonic() - begun < 0.5


@pytest.mark.alone
def test_all_constraints_of_a_request_have_a_time_together() -> None:
    with checking() as checker:
        allowance = Allowance(1.5)
        for num in range(10):
            if try_text(checker, f"x{num}", allowance) != "right":
                break
            assert try_text(checker, "computes for a second", Allowance()) == "right"
        assert 0 < allowance.seconds <= 1.5
        assert try_text(checker, "computes", allowance) == "too complex"
        assert allowance.seconds < 0.1
