"""Which tests share a pytest-xdist worker: those that share a server."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

__all__ = ["SideBySide"]

_CONFORMANCE = "tests/conformance/"
_SHARED_SERVER = re.compile(r"\b(small|default): Served\b")


class SideBySide(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Hands out whole files, each to one worker.

    All files of `tests/conformance/` that use the servers of `tests/conftest.py` go to the same worker, so that each
    server is started once. The order is that of the collection: the conformance tests, which take longest, come first.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(_CONFORMANCE) and _uses_shared_server(self.config.rootpath / file):
            return _CONFORMANCE
        return file


@cache
def _uses_shared_server(file: Path) -> bool:
    return _SHARED_SERVER.search(file.read_text()) is not None
