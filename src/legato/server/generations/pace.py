"""Intervals and time limits of leases, journals and their readers, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """Times that all servers of a store share."""

    lease_s: float = 5.0
    """How long a lease lasts that is not renewed."""
    beat_s: float = 1.0
    """How often a process renews its leases, and looks at those of others."""
    sweep_s: float = 60.0
    """How often old journals are removed."""
    poll_s: float = 0.1
    """How often the journal of a generation on another server is read."""
    patience_s: float = 2.0
    """How long readers wait for a slow journal; then they get entries that it does not have yet."""
    retry_s: float = 1.0
    """The longest pause before the journal is tried again."""
    keep_s: float = 60.0
    """How long the lease of a generation whose end cannot be written is renewed. Then another server continues it."""
