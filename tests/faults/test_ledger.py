"""Usage, under a fault of the store at every call that the books make: what was sent is counted, once."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from legato.dialects import openai
from legato.engines.scripted import Pause, ScriptedEngine
from legato.run.admission import Admission
from legato.run.models import Model
from legato.run.plan import plan
from legato.server.ledger import Ledger
from legato.storage.keys import Key
from legato.storage.usage import UsageRow
from legato.system.supervisor import Supervisor
from tests.faults import HANGS_AFTER_S
from tests.faults.doubles import CLOCKS, DEATHS, Fault, FaultyStore, Kind

SCRIPT = [part for _ in range(12) for part in (b"word ", Pause(0.2))]
KINDS = [kind for kind in Kind if kind not in (*CLOCKS, *DEATHS)]


async def count(store: FaultyStore, num_read: int | None) -> int:
    """Read so many events of a request for three choices, or all; return how many tokens it took."""
    supervisor = Supervisor()
    ledger = Ledger(store, supervisor)
    model = Model("m", ScriptedEngine(SCRIPT), Admission())
    run = plan(openai.CompletionsDialect().parse({"model": "m", "prompt": "four", "max_tokens": 99, "n": 3}), model)
    async with asyncio.timeout(HANGS_AFTER_S), ledger.running():
        async with ledger.account(Key("ann"), run), aclosing(run.events()) as events:
            async for _ in events:
                num_read = None if num_read is None else num_read - 1
                if num_read == 0:
                    break
        await asyncio.sleep(0.7)
    await supervisor.aclose()
    return run.taken().completion_tokens


async def try_fault(file: Path, num_read: int | None, fault: Fault) -> None:
    """Check what is counted under a fault."""
    store = await asyncio.to_thread(FaultyStore.at, file)
    with closing(store):
        store.fault = fault
        num_tokens = await count(store, num_read)
        fault.is_over = True
        assert store.usage() == [UsageRow(store.usage()[0].day, "ann", "m", 1, 4, 0, num_tokens)]


@pytest.mark.parametrize("num_read", [None, 120])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_call_counts_nothing_twice_and_loses_nothing(
    kind: Kind, num_read: int | None, tmp_path: Path
) -> None:
    async def try_all() -> None:
        dry = Fault(kind, 0)
        await try_fault(tmp_path / "0.db", num_read, dry)
        assert dry.num_calls >= 1
        async with asyncio.TaskGroup() as group:
            for at in range(1, dry.num_calls + 1):
                file = tmp_path / f"{at}.db"
                shutil.copy(tmp_path / "0.db", file)
                with closing(sqlite3.connect(file)) as connection:
                    connection.executescript("DELETE FROM usage; DELETE FROM batches;")
                group.create_task(try_fault(file, num_read, Fault(kind, at)))

    asyncio.run(try_all())
