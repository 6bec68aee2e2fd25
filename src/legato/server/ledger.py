"""Charges each request before it runs with the most that it can take, and counts what it takes while it runs.

It receives keys and `Run`s, and writes counts to the store twice a second, off the path of requests. It knows no wire
format.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from legato.errors import StoreUnavailable
from legato.run.run import Run
from legato.server.outage import Outage
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.storage.usage import Batch, Charge, UsageRow
from legato.system.clock import Clock
from legato.system.supervisor import Supervisor
from legato.types import Usage

__all__ = ["Ledger"]

_EVERY_S = 0.5
_LAST_PAUSES_S = (0.2, 0.5, 1.0, 0.0)
"""Pauses after the attempts to write the rest when the server ends."""


@dataclass(eq=False)
class _Account:
    """A run that is being counted."""

    key: str
    run: Run
    charge: Charge | None
    is_journaled: bool
    counted: UsageRow = field(default_factory=lambda: UsageRow("", "", ""))
    """What is in `Ledger._rows`, or written, already."""
    is_over: bool = False


class Ledger:
    """Charges and counts for one server."""

    def __init__(self, store: Store, supervisor: Supervisor, clock: Clock = Clock()) -> None:  # noqa: B008 - frozen
        self._store = store
        self._supervisor = supervisor
        self._clock = clock
        self._accounts: set[_Account] = set()
        self._rows: dict[tuple[str, str, str], UsageRow] = {}
        """What is to be written, by day, key and model."""
        self._refunds: list[Charge] = []
        self._writer = secrets.token_hex(8)
        self._num_batches = 0
        self._unwritten: tuple[Batch, Sequence[Charge]] | None = None
        """The last batch, while it is unknown whether the store has written it."""
        self._outage = Outage("usage is kept in memory")

    @asynccontextmanager
    async def account(self, key: Key, run: Run, *, is_journaled: bool = False) -> AsyncIterator[None]:
        """Charge a run to its key, and count what it takes while the context is open. Tokens of a journaled run are
        counted by the journal, with its entries.

        Raises:
            RateLimited, BudgetSpent, InvalidField: it may take more than the key has left; see `Store.charge`.
            StoreUnavailable: what the key has left cannot be read.
        """
        charge = await self._charge(key, run) if key.is_limited else None
        account = _Account(key.name, run, charge, is_journaled)
        self._accounts.add(account)
        try:
            yield
        finally:
            account.is_over = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write the counts every `_EVERY_S` while the context is open, and at its end."""
        writing = self._supervisor.start("usage", self._write_on)
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait((writing,))
            for pause_s in _LAST_PAUSES_S:
                if await self._write():
                    break
                await asyncio.sleep(pause_s)

    async def _charge(self, key: Key, run: Run) -> Charge:
        prompts = sum(job.prompt.num_tokens for job in run.jobs[:: run.num_drawn])
        most = prompts + sum(job.max_tokens for job in run.jobs)
        charges: list[Charge] = []
        try:
            await self._store.writes.run(lambda: charges.append(self._store.charge(key, most)))
        except asyncio.CancelledError:
            self._refunds += charges  # The request was charged and will not run.
            raise
        return charges[0]

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._write()

    async def _write(self) -> bool:
        """Write the counts, and return whether that succeeded. A batch whose outcome is unknown is sent again,
        unchanged: the store does not add it twice.
        """
        for account in [*self._accounts]:
            self._count(account)
        try:
            while self._unwritten or self._rows or self._refunds:
                if self._unwritten is None:
                    self._num_batches += 1
                    batch = Batch(self._writer, self._num_batches, tuple(self._rows.values()))
                    self._unwritten = batch, self._refunds
                    self._rows, self._refunds = {}, []
                await self._store.writes.run(self._store.record, *self._unwritten)
                self._unwritten = None
        except StoreUnavailable as error:
            self._outage.begin(error)
            return False
        self._outage.end()
        return True

    def _count(self, account: _Account) -> None:
        """Add what is new of an account to the rows to be written, and close it if its run is over."""
        run, old = account.run, account.counted
        if not run.usages and not account.is_over:
            return
        taken = run.taken()
        new = replace(
            old,
            requests=int(bool(run.usages)),
            prompt_tokens=taken.prompt_tokens,
            cached_tokens=taken.cached_tokens,
            completion_tokens=taken.completion_tokens,
        )
        if new != old and not account.is_journaled:
            self._add(
                UsageRow(
                    self._clock.day(),
                    account.key,
                    run.model.name,
                    new.requests - old.requests,
                    new.prompt_tokens - old.prompt_tokens,
                    new.cached_tokens - old.cached_tokens,
                    new.completion_tokens - old.completion_tokens,
                )
            )
            account.counted = new
        if account.is_over:
            self._accounts.remove(account)
            if account.charge is not None:
                self._refunds.append(replace(account.charge, tokens=account.charge.tokens - _total(taken)))

    def _add(self, row: UsageRow) -> None:
        place = (row.day, row.key, row.model)
        self._rows[place] = self._rows[place] + row if place in self._rows else row


def _total(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
