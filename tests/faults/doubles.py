"""A store and a clock to which something happens at their n-th call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NoReturn

import sqlalchemy as sa

from legato.errors import StoreUnavailable
from legato.storage.store import Store
from legato.system.clock import Clock
from tests.faults import tried

__all__ = ["CLOCKS", "DEATHS", "Fault", "FaultyClock", "FaultyStore", "Kind"]

HANG_S = 0.5
AWAY_S = 0.7


class Kind(Enum):
    """What happens at a call."""

    FAILS = "a call fails"
    LOSES = "a call fails behind its commit"
    HANGS = "a call hangs"
    AWAY = "the store goes away"
    DIES = "the process dies"
    DIES_BEHIND = "the process dies behind a commit"
    LEAPS = "the clock goes forwards"
    FALLS = "the clock goes backwards"
    STALLS = "the steady clock goes forwards"


CLOCKS = (Kind.LEAPS, Kind.FALLS, Kind.STALLS)
DEATHS = (Kind.DIES, Kind.DIES_BEHIND)
_WRITES = (Kind.LOSES, Kind.DIES_BEHIND)
"""What happens behind a commit, and so only where something is written."""


class Fault:
    """Something that happens at the n-th of all calls of those that share it, from all threads; 0: never."""

    def __init__(self, kind: Kind, at: int) -> None:
        self.kind = kind
        self.at = at
        self.num_calls = 0
        self.hit_at: float | None = None
        self.is_over = False
        """Whether calls are not counted any more."""
        self._lock = threading.Lock()

    @property
    def is_hit(self) -> bool:
        """Whether it has happened."""
        return self.hit_at is not None

    def call(self, *, is_write: bool) -> bool:
        """Count a call; return whether it is the one."""
        with self._lock:
            if self.is_over or (self.kind in _WRITES and not is_write):
                return False
            self.num_calls += 1
            if self.num_calls != self.at:
                return False
            self.hit_at = time.monotonic()
            tried[self.kind.value] += 1
        return True


_OPENING = threading.Lock()
"""Alembic migrates one database at a time."""


class FaultyStore(Store):
    """A store of one process, as it looks to that."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.fault: Fault | None = None
        self.is_dead = False
        """Whether its process is: then nothing is done any more, and nothing returns until the process is gone."""
        self.released = threading.Event()

    @classmethod
    def at(cls, file: Path) -> FaultyStore:
        """Open a file."""
        with _OPENING:
            store = cls.open(f"sqlite:///{file}")
        assert isinstance(store, cls)
        return store

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads."""
        with self._called(is_write=False), super().reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that writes."""
        with self._called(is_write=True), super().writing() as connection:
            yield connection

    @contextmanager
    def _called(self, *, is_write: bool) -> Iterator[None]:
        fault = self.fault
        is_it = fault is not None and fault.call(is_write=is_write)
        kind = fault.kind if fault is not None else None
        if kind is Kind.AWAY and fault is not None and fault.hit_at is not None:
            is_it = time.monotonic() - fault.hit_at < AWAY_S
        if is_it and kind is Kind.DIES:
            self._die()
        if self.is_dead:
            self._stay_dead()
        if is_it and kind in (Kind.FAILS, Kind.AWAY):
            raise StoreUnavailable("the double says so")
        if is_it and kind is Kind.HANGS:
            time.sleep(HANG_S)
        yield
        if is_it and kind is Kind.DIES_BEHIND:
            self._die()
        if self.is_dead:
            self._stay_dead()
        if is_it and kind is Kind.LOSES:
            raise StoreUnavailable("the double has lost the acknowledgement")

    def _stay_dead(self) -> NoReturn:
        self.released.wait()
        raise StoreUnavailable("the process is dead")

    def _die(self) -> None:
        self.is_dead = True


_SHIFTS = {Kind.LEAPS: (3600.0, 0.0), Kind.FALLS: (-3600.0, 0.0), Kind.STALLS: (0.0, 60.0)}


class FaultyClock:
    """Clocks of a machine of which one is set, or stands still, at the n-th reading of any."""

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault
        self._wall, self._steady = (0.0, 0.0)
        self.clock = Clock(self._read_wall, self._read_steady)

    def _read_wall(self) -> float:
        self._read()
        return time.time() + self._wall

    def _read_steady(self) -> float:
        self._read()
        return time.monotonic() + self._steady

    def _read(self) -> None:
        if self._fault is not None and self._fault.call(is_write=False):
            self._wall, self._steady = _SHIFTS[self._fault.kind]
