"""How often and how long what runs beside generations does what it does, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """Times that all servers of a store share."""

    lease_s: float = 5.0
    """So long a generation stays with a process that is not heard of."""
    beat_s: float = 1.0
    """How often a process renews its leases, and looks at those of others."""
    sweep_s: float = 60.0
    """How often old journals are removed."""
    poll_s: float = 0.1
    """How often the journal of a generation that runs elsewhere is looked at."""
    patience_s: float = 2.0
    """So long readers wait for a slow journal; then they get what it does not have yet."""
    retry_s: float = 1.0
    """The longest pause before the journal is tried again."""
    keep_s: float = 60.0
    """So long a generation whose end cannot be written is kept from other servers, which would come to it again."""
