"""How the log is written: lines of text, or of JSON for machines, to standard error. It knows no requests.

Whoever logs never waits: a thread writes, and what has no room while nobody reads is dropped, counted, and told of
later. Whatever comes from outside is escaped, so that a line is always one line.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["escape", "set_up_logs"]

_MAX_BYTES = 1 << 20
"""What waits for who reads the log; a little more than 10,000 requests."""
_CLOSE_S = 2.0
"""How long the process stays for its last lines when it ends."""
_PIPE_BYTES = 4096
"""A pipe that can be written to takes so many bytes at once (`PIPE_BUF`)."""


def set_up_logs(form: str, *, verbose: bool) -> Callable[[str], None]:
    """Write the log to standard error, and return what writes a line there that is not of the log.

    Args:
        form: `text` or `json`.
        verbose: also what is no warning.
    """
    writer = _Writer(sys.stderr.fileno())
    writer.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[writer])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Which tells at length that nothing was to be done.
    return writer.say


def escape(text: str) -> str:
    """Return a text as one line that does nothing to a terminal: what is not printable is written as in Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _Text(logging.Formatter):
    """A line for each record. The lines of an exception follow, set off so that none can be taken for a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        line = escape(f"{self.formatTime(record)} {record.name} {record.getMessage()}")
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n".join([line, *(f"  | {escape(step)}" for step in trace)])


class _Json(logging.Formatter):
    """One object per line, in ASCII. What a record was given as `notes` is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "notes", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Writer(logging.Handler):
    """Writes to a descriptor, in a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: deque[tuple[bytes, int]] = deque()
        """What is to be written, and how many lines of the log are lost with it if it cannot be."""
        self._num_bytes = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._ends_at: float | None = None
        """When the thread gives up what is left; None: the log goes on."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record to be written; drop it if there is no room."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a line that cannot be made must not end who logs
            line = escape(f"{record.name} {record.msg!r} cannot be written: {error!r}")
        self._take(line)

    def say(self, line: str) -> None:
        """Take a line that is not of the log."""
        self._take(escape(line))

    def close(self) -> None:
        """Write what is left, in bounded time."""
        with self._changed:
            self._ends_at = time.monotonic() + _CLOSE_S
            self._changed.notify()
        self._thread.join(_CLOSE_S + 1)
        super().close()

    def _take(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._num_bytes + len(data) > _MAX_BYTES:
                self._num_dropped += 1
                return
            self._tell_dropped()
            self._put(data, 1)
            self._changed.notify()

    def _put(self, data: bytes, num_lines: int) -> None:
        self._waiting.append((data, num_lines))
        self._num_bytes += len(data)

    def _tell_dropped(self) -> None:
        """Say in the log how much of it is missing here."""
        if self._num_dropped:
            words = "lines of the log that were dropped here, because nobody read them in time: %d"
            record = logging.LogRecord(__name__, logging.WARNING, "", 0, words, (self._num_dropped,), None)
            self._put(self.format(record).encode() + b"\n", self._num_dropped)
            self._num_dropped = 0

    def _run(self) -> None:
        is_written = True
        while True:
            with self._changed:
                if is_written and not self._waiting:
                    self._tell_dropped()
                self._changed.wait_for(lambda: self._waiting or self._ends_at is not None)
                if not self._waiting:
                    return
                data, num_lines = self._waiting.popleft()
                self._num_bytes -= len(data)
            try:
                is_written = self._write(data)
            except OSError:  # Nobody can read any more, or the disk is full.
                is_written = False
            if not is_written:
                with self._changed:
                    self._num_dropped += num_lines

    def _write(self, data: bytes) -> bool:
        """Write a line as fast as it is read, so that it can be given up at any time; return whether it was written."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while data:
            if self._ends_at is not None and time.monotonic() > self._ends_at:
                return False
            if poll.poll(100):
                data = data[os.write(self._descriptor, data[:_PIPE_BYTES]) :]
        return True
