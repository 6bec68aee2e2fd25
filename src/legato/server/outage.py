"""Says in the log that something cannot be done, once, and that it can be done again."""

from __future__ import annotations

import logging

from legato.errors import StoreUnavailable

__all__ = ["Outage"]

_log = logging.getLogger("legato.server")


class Outage:
    """What may fail again and again while the database is away. `what` says what follows from it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_on = False

    def begin(self, error: StoreUnavailable) -> None:
        """Note a failure."""
        if not self._is_on:
            self._is_on = True
            _log.error("%s: %s", self._what, error.reason or error.message)

    def end(self) -> None:
        """Note a success."""
        if self._is_on:
            self._is_on = False
            _log.warning("%s no longer: the database answers", self._what)
