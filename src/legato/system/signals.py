"""The signals that end a server, and the processes that it starts: they leave with it, not before.

A service manager, or Ctrl-C, signals the whole group. If a worker ended at once, the time that running answers have to
end would be spent on another one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ENDING", "blocked_in_children"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_blocks = threading.local()
"""Of each thread: how many want the signals blocked now, and what was blocked before the first of them."""


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Let processes that this thread starts meanwhile not be reached by these signals, from their first moment on.

    They inherit the thread's mask. A signal that comes meanwhile is handled afterwards. Tasks of one thread may overlap
    here, and end in any order: the last one lets the signals in again.
    """
    num = getattr(_blocks, "num", 0)
    if not num:
        _blocks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    _blocks.num = num + 1
    try:
        yield
    finally:
        _blocks.num -= 1
        if not _blocks.num:
            signal.pthread_sigmask(signal.SIG_SETMASK, _blocks.before)
