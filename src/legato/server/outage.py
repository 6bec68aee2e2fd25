"""Logs the begin and the end of an outage of the database, each once."""

from __future__ import annotations

import logging

from legato.errors import StoreUnavailable

__all__ = ["Outage"]

_log = logging.getLogger("legato.server")


class Outage:
    """Work that fails repeatedly while the database is away. `what` names the consequence, for the log."""

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
