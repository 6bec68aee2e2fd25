"""Tells how many faults were tried."""

from __future__ import annotations

import pytest

from tests.faults import tried


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add a line for each kind."""
    if tried:
        terminalreporter.section("faults tried on purpose")
        for kind, num in sorted(tried.items()):
            terminalreporter.line(f"{num:5} {kind}")
        terminalreporter.line(f"{tried.total():5} in all")
