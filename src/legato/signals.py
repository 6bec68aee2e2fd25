"""The signals that end a server, and the processes that it starts: they leave with it, not before.

A service manager, or Ctrl-C, signals the whole group. If a worker ended at once, the time that running answers have to
end would be spent on another one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ENDING", "blocked_in_children"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Let processes that this thread starts meanwhile not be reached by these signals, from their first moment on.

    They inherit the thread's mask. A signal that comes meanwhile is handled afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
