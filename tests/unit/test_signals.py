"""Signals that processes are started without: whatever overlaps, this process gets them again."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys

import pytest

from legato.system.signals import ENDING, blocked_in_children

SHOW = "import signal; print(sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


def blocked() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()) if number in ENDING}


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_starts_that_overlap_leave_no_signal_blocked(order: tuple[int, ...]) -> None:
    before = blocked()
    blocks = [blocked_in_children() for _ in range(3)]
    for block in blocks:
        block.__enter__()
        assert blocked() == {*ENDING}
    for index in order:
        assert blocked() == {*ENDING}
        blocks[index].__exit__(None, None, None)
    assert blocked() == before


def test_a_child_begins_with_them_blocked() -> None:
    with blocked_in_children():
        shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(sorted(int(number) for number in ENDING))
