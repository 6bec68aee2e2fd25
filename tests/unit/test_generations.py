"""The parts of resumable generations (`legato.server.generations`), each alone: readers, driver, writer, leases."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from legato.config import StoreSettings
from legato.dialects import openai
from legato.engines.scripted import Fault, Pause, Script, ScriptedEngine
from legato.errors import (
    EngineUnavailable,
    GenerationNotFound,
    JournalFull,
    LegatoError,
    ModelNotFound,
    StoreUnavailable,
)
from legato.run.admission import Admission
from legato.run.models import Model, Models
from legato.run.plan import plan
from legato.run.run import Run
from legato.server.generations import Generations
from legato.server.generations.driver import Driver
from legato.server.generations.leases import Adoption, Leases
from legato.server.generations.live import REFUSED, Live
from legato.server.generations.pace import Pace
from legato.server.generations.replay import Replay, failure_frames
from legato.server.generations.writer import Writer
from legato.server.ledger import Ledger
from legato.server.telemetry import Telemetry
from legato.storage.journal import Journal
from legato.storage.keys import ANYONE
from legato.storage.records import End, Entry, Lease, Record, Written, new_id
from legato.storage.store import Store
from legato.system.clock import Clock
from legato.system.supervisor import Supervisor, beside
from legato.types import Handle, Token

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "go", "max_tokens": 50, "stream": True, "resumable": True}
DIALECTS = {PATH: openai.CompletionsDialect()}


class DoubtfulStore(Store):
    """A store whose writes wait, or fail, as long as a test wants."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_away = False
        self.num_unacknowledged = 0

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction."""
        self.may_write.wait(10)
        if self.is_away:
            raise StoreUnavailable("away")
        with super().writing() as connection:
            yield connection
        if self.num_unacknowledged:
            self.num_unacknowledged -= 1
            raise StoreUnavailable("the connection was lost behind the commit")


@dataclass
class Bench:
    """What the parts are made of."""

    store: DoubtfulStore
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([b"ab", b"c"]))
    now: float = 1000.0
    settings: StoreSettings = StoreSettings()  # noqa: RUF009 - it is frozen
    pace: Pace = Pace(retry_s=0.02)  # noqa: RUF009 - it is frozen
    lives: dict[str, Live] = field(default_factory=dict)
    noted: list[Live] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Put them together."""
        self.clock = Clock(steady=lambda: self.now)
        self.models = Models({"m": Model("m", self.engine, Admission())}, {})
        self.journal = Journal(self.store, self.settings, self.clock)

    def run(self) -> Run:
        """A run of the script."""
        run = plan(openai.CompletionsDialect().parse(dict(BODY)), self.models.resolve("m"))
        return replace(run, request=replace(run.request, handle=Handle(new_id(), 1)), tokens=[])

    def record(self, run: Run) -> Record:
        """Its record."""
        handle = run.request.handle
        assert handle is not None
        return Record(handle.id, "", PATH, BODY, Written(), run.jobs[0].to_json(), handle.created)

    def begin(self, known: Sequence[Entry] = ()) -> Live:
        """A generation that is in the journal, and driven by nobody."""
        run = self.run()
        live = Live(self.record(run), run, failure_frames, self.clock, known)
        self.journal.create(live.record)
        self.lives[live.record.id] = live
        return live

    def writer(self) -> Writer:
        """What journals."""
        return Writer(self.journal, self.lives, self.pace, self.clock)

    def leases(self) -> Leases:
        """What keeps them."""
        return Leases(self.journal, self.lives, self.noted.append, self.settings, Pace(), self.clock)

    def stored(self, live: Live) -> tuple[str | None, list[bytes]]:
        """What the journal has of one."""
        state, entries = self.journal.read(live.record.id, 0)
        return state, [entry.frame for entry in entries]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """The parts of a server, with a database of its own."""
    with closing(DoubtfulStore.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        assert isinstance(store, DoubtfulStore)
        yield Bench(store)


def go(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in an event loop; none takes long."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), 10)

    asyncio.run(bounded())


async def read(live: Live, after: int = 0) -> list[bytes]:
    """Follow a generation to its end."""
    async with aclosing(live.follow(after)) as frames:
        return [frame async for _, frame in frames]


async def turns() -> None:
    """Let others run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something."""
    while not is_so():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------------------
# What readers follow


def test_readers_have_what_may_be_shown_and_then_the_end(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        async with beside(read(live)) as first, beside(read(live, 1)) as second:
            for frame in (b"1", b"2"):
                live.add(Entry(frame))
            await turns()
            assert (live.num_readers, live.num_shown) == (2, 0)
            live.finish(End("done"))
            live.add(Entry(b"too late"))
            live.finish(End("failed"))
            assert not live.is_over
            live.save(live.news())
            assert (await first, await second) == ([b"1", b"2"], [b"2"])
        bench.now += 5
        assert (live.num_readers, live.end) == (0, End("done"))
        assert await read(live) == [b"1", b"2"], "also later"
        assert live.seen_at == bench.now

    go(test)


def test_an_error_before_the_first_frame_is_raised_and_a_later_one_is_told(bench: Bench) -> None:
    async def test() -> None:
        refused, failed = bench.begin(), bench.begin()
        refused.fail(EngineUnavailable("gone"))
        assert refused.end == REFUSED
        refused.show()
        with pytest.raises(EngineUnavailable):
            await read(refused)
        failed.add(Entry(b"1"))
        failed.fail(EngineUnavailable("gone"))
        assert failed.end == End("failed")
        failed.show()
        assert (await read(failed))[1:] == [*failure_frames(EngineUnavailable("gone"))]

    go(test)


def test_who_reads_what_is_lost_is_told_by_its_end(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        live.add(Entry(b"1"))
        live.save(live.news())
        async with beside(read(live)) as reader:
            await turns()
            live.lose()
            assert await reader == [b"1"]
        assert (live.is_lost, live.end) == (True, None)

    go(test)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


def driver(bench: Bench, live: Live) -> Driver:
    """What drives a generation."""
    supervisor = Supervisor()
    telemetry = Telemetry(bench.models, bench.store, supervisor, traces_url="")
    encoder = DIALECTS[PATH].encoder(live.run.request)
    return Driver(live, encoder, ANYONE, Ledger(bench.store, supervisor), telemetry, bench.noted.append)


def text(live: Live) -> str:
    """The text of the frames."""
    return "".join(part.split('"')[0] for frame in live.entries for part in frame.frame.decode().split('"text":"')[1:])


def test_a_driver_gives_all_frames_with_their_tokens_and_the_end(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        await driver(bench, live).drive()
        assert text(live) == "abc"
        assert [token.data for entry in live.entries for token in entry.tokens] == [b"a", b"b", b"c"]
        assert live.end is not None
        assert (live.end.state, live.end.written) == ("done", Written("abc"))
        assert b'"abc"' in (live.end.answer or b"")
        assert len(bench.noted) == len(live.entries) + 1
        assert (live.taken().requests, live.taken().completion_tokens) == (1, 3)

    go(test)


def test_a_driver_passes_over_what_is_known(bench: Bench) -> None:
    async def test() -> None:
        first = bench.begin()
        await driver(bench, first).drive()
        again = bench.begin(known=first.entries[:2])
        again.run = replace(again.run, written=(Token(97, b"a"), Token(98, b"b")))
        bench.engine._script = [b"c"]
        await driver(bench, again).drive()
        assert text(again) == "abc"
        assert [entry.tokens for entry in again.entries] == [entry.tokens for entry in first.entries]

    go(test)


@pytest.mark.parametrize("script", [[Fault("no")], [b"a", Fault("no")]])
def test_a_driver_tells_why_it_could_not_go_on(bench: Bench, script: Script) -> None:
    async def test() -> None:
        bench.engine._script = script
        live = bench.begin()
        await driver(bench, live).drive()
        assert live.error is not None
        assert live.error.message == "no"
        assert live.end == (REFUSED if len(script) == 1 else End("failed"))

    go(test)


def test_a_driver_that_is_cancelled_ends_nothing(bench: Bench) -> None:
    async def test() -> None:
        bench.engine._script = [b"a", Pause(30)]
        live = bench.begin()
        async with beside(driver(bench, live).drive()):
            await until(lambda: len(live.entries) == 1)
        assert live.end is None
        assert bench.engine.counters()["running"] == 0

    go(test)


# ---------------------------------------------------------------------------------------------------------------------
# The writer


def test_readers_get_nothing_before_the_journal_has_it(bench: Bench) -> None:
    async def test() -> None:
        live, writer = bench.begin(), bench.writer()
        async with beside(writer.run()), beside(read(live)) as reader:
            bench.store.may_write.clear()
            live.add(Entry(b"1"))
            writer.note(live)
            await asyncio.sleep(0.03)
            assert live.num_shown == 0
            bench.store.may_write.set()
            await until(lambda: live.num_shown == 1)
            assert bench.stored(live) == ("running", [b"1"])
            live.add(Entry(b"2"))
            live.finish(End("done", b"{}"))
            writer.note(live)
            assert await reader == [b"1", b"2"]
        assert bench.stored(live) == ("done", [b"1", b"2"])
        assert bench.lives == {}

    go(test)


def test_a_journal_that_hangs_does_not_hold_up_readers(bench: Bench) -> None:
    async def test() -> None:
        bench.pace = replace(bench.pace, patience_s=0.1)
        live, writer = bench.begin(), bench.writer()
        bench.store.may_write.clear()
        async with beside(writer.run()), beside(read(live)) as reader:
            for frame in (b"1", b"2", b"3"):
                live.add(Entry(frame))
                writer.note(live)
                await until(lambda: live.num_shown == len(live.entries))
            live.finish(End("done"))
            writer.note(live)
            assert await reader == [b"1", b"2", b"3"]
            assert writer.is_away
            assert [*bench.lives.values()] == [live], "its end is still to be written"
            bench.store.may_write.set()
            await until(lambda: not bench.lives)
        assert bench.stored(live) == ("done", [b"1", b"2", b"3"])

    go(test)


@pytest.mark.parametrize("num_ends", [0, 1])
def test_what_was_written_without_an_acknowledgement_is_written_once(bench: Bench, num_ends: int) -> None:
    """A stream goes on behind such a write, and so does one that begins then."""

    async def test() -> None:
        live, writer = bench.begin(), bench.writer()
        async with beside(writer.run()):
            bench.store.num_unacknowledged = 1
            live.add(Entry(b"1", (Token(1, b"a"),)))
            if num_ends:
                live.finish(End("done", b"{}"))
            writer.note(live)
            await until(lambda: not bench.store.num_unacknowledged)
            if not num_ends:
                live.add(Entry(b"2"))
                live.finish(End("done", b"{}"))
                writer.note(live)
            other = bench.begin()
            other.add(Entry(b"1"))
            other.finish(End("done"))
            writer.note(other)
            await until(lambda: not bench.lives)
        assert bench.stored(live) == ("done", [entry.frame for entry in live.entries])
        assert bench.stored(other) == ("done", [b"1"])
        assert not writer.is_away

    go(test)


def test_what_the_journal_has_for_another_is_lost_here(bench: Bench) -> None:
    async def test() -> None:
        live, other, writer = bench.begin(), bench.begin(), bench.writer()
        bench.journal.delete(live.record.id, "")
        for one in (live, other):
            one.add(Entry(b"1"))
        assert await writer.flush()
        assert (live.is_lost, other.num_saved) == (True, 1)
        assert [*bench.lives.values()] == [other]

    go(test)


def test_what_has_no_room_fails_with_what_was_shown(bench: Bench) -> None:
    async def test() -> None:
        bench.settings = StoreSettings(journal_bytes=4000)
        bench.journal = Journal(bench.store, bench.settings, bench.clock)
        writer, small = bench.writer(), bench.begin()
        large = bench.begin()
        for live in (small, large):
            live.add(Entry(b"1"))
        assert await writer.flush()
        large.add(Entry(b"x" * 4000))
        small.add(Entry(b"2"))
        async with beside(read(large)) as reader:
            assert await writer.flush()
            assert large.end == End("failed")
            assert await writer.flush()
            first, *rest = await reader
        assert isinstance(large.error, JournalFull)
        assert [first, *rest] == [b"1", *failure_frames(large.error)]
        assert bench.stored(large) == ("failed", [first, *rest])
        assert (small.num_saved, small.end) == (2, None)

    go(test)


def test_a_fault_in_one_generation_is_not_that_of_others(bench: Bench) -> None:
    class Unwritable:
        """No token."""

    async def test() -> None:
        broken, other, writer = bench.begin(), bench.begin(), bench.writer()
        broken.add(Entry(b"1", (Unwritable(),)))  # type: ignore[arg-type]
        other.add(Entry(b"1"))
        async with beside(writer.run()):
            for live in (broken, other):
                writer.note(live)
            await until(lambda: other.num_shown == 1)
            await until(lambda: broken.record.id not in bench.lives)
        with pytest.raises(LegatoError, match="something went wrong in the server"):
            await read(broken)
        assert bench.stored(broken) == (None, [])

    go(test)


# ---------------------------------------------------------------------------------------------------------------------
# Leases


async def idle() -> None:
    """Drive nothing."""
    await asyncio.sleep(60)


def heard(bench: Bench, live: Live) -> Lease:
    """Whose a generation is."""
    (lease,) = (lease for lease in bench.journal.leases() if lease.id == live.record.id)
    return lease


def test_only_what_is_driven_here_is_renewed(bench: Bench) -> None:
    async def test() -> None:
        live, unknown, ended, leases = bench.begin(), bench.begin(), bench.begin(), bench.leases()
        del bench.lives[unknown.record.id]
        before = [heard(bench, one) for one in (live, unknown, ended)]
        async with beside(idle()) as live.task, beside(idle()) as ended.task:
            ended.finish(End("done"))
            await leases.renew()
            assert [heard(bench, one) != then for one, then in zip((live, unknown, ended), before, strict=True)] == [
                True,
                False,
                True,
            ]
            bench.now += 61
            before = [heard(bench, ended)]
            await leases.renew()
            assert [heard(bench, ended)] == before, "an end that cannot be written is not waited for for ever"

    go(test)


def test_what_is_not_ours_any_more_is_given_up(bench: Bench) -> None:
    async def test() -> None:
        live, leases = bench.begin(), bench.leases()
        async with beside(idle()) as live.task:
            Journal(bench.store, bench.settings).adopt(heard(bench, live))
            await leases.renew()
            assert (live.is_lost, bench.lives) == (True, {})
            await turns()
            assert live.task.cancelled()

    go(test)


def test_what_nobody_reads_is_ended_after_a_while(bench: Bench) -> None:
    async def test() -> None:
        live, leases = bench.begin(), bench.leases()
        live.add(Entry(b"1"))
        live.save(live.news())
        async with beside(idle()) as live.task:
            bench.now += 250
            await leases.renew()
            bench.journal.visit(live.record.id)
            bench.now += 250
            await leases.renew()
            assert live.end is None, "somebody reads it elsewhere"
            async with beside(read(live)):
                await turns()
                bench.now += 1000
                await leases.renew()
                assert live.end is None, "somebody reads it here"
            bench.now += 301
            await leases.renew()
            assert live.end == End("cancelled")
            assert bench.noted == [live]

    go(test)


# ---------------------------------------------------------------------------------------------------------------------
# Adoption


class Plans(Replay):
    """Counts what is planned."""

    num = 0
    error: LegatoError | None = None

    async def run(self, record: Record) -> Run:
        """Plan, or fail."""
        self.num += 1
        if self.error is not None:
            raise self.error
        return await super().run(record)


@dataclass
class Listener:
    """A process that may adopt, and what it has adopted."""

    bench: Bench
    models: Mapping[str, Model]

    def __post_init__(self) -> None:
        """Begin to listen."""
        self.adopted: list[tuple[str, tuple[Token, ...], int]] = []
        self.lives: dict[str, Live] = {}
        self.journal = Journal(self.bench.store, self.bench.settings, self.bench.clock)
        self.replay = Plans(Models(self.models, {}), DIALECTS)
        self.adoption = Adoption(
            self.journal, self.lives, self.replay, self.take, self.bench.settings, Pace(), self.bench.clock
        )

    def take(self, record: Record, run: Run, known: Sequence[Entry]) -> None:
        """Be given a generation."""
        self.adopted.append((record.id, run.written, len(known)))
        self.lives[record.id] = Live(record, run, failure_frames, self.bench.clock, known)

    async def listen(self, *moments: float) -> None:
        """Listen, after so many seconds each."""
        for seconds in moments:
            self.bench.now += seconds
            await self.adoption.listen()


def test_who_is_not_heard_is_adopted_with_what_it_wrote(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        live.add(Entry(b"1", (Token(1, b"a"),)))
        await bench.writer().flush()
        there = Listener(bench, bench.models.served)
        await there.listen(0, 4)
        bench.journal.renew([live.record.id])
        await there.listen(4, 4.9)
        assert there.adopted == [], "it was heard in between"
        await there.listen(0.2)
        assert there.adopted == [(live.record.id, (Token(1, b"a"),), 1)]
        await there.listen(10, 10)
        assert len(there.adopted) == 1

    go(test)


def test_what_was_left_is_adopted_at_once(bench: Bench) -> None:
    async def test() -> None:
        live, there = bench.begin(), Listener(bench, bench.models.served)
        bench.journal.release()
        await there.listen(0)
        assert [id for id, *_ in there.adopted] == [live.record.id]
        del there.lives[live.record.id]  # As if it were broken off, or its adoption had not been acknowledged.
        await there.listen(0)
        assert [id for id, *_ in there.adopted] == [live.record.id] * 2

    go(test)


def test_what_has_no_model_here_is_planned_once_and_fails_in_the_end(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        live.add(Entry(b"1"))
        await bench.writer().flush()
        there = Listener(bench, {"other": bench.models.served["m"]})
        await there.listen(0, 6, *[1] * 200)
        assert there.replay.num == 1
        assert bench.stored(live)[0] == "running", "another server may have it"
        await there.listen(*[1] * 100)
        state, frames = bench.stored(live)
        assert state == "failed"
        assert b"model_not_found" in frames[1]
        assert frames[2] == b"data: [DONE]\n\n"
        assert there.replay.num == 1

    go(test)


@pytest.mark.parametrize("num_failures", [0, 1])
def test_what_can_go_on_nowhere_fails_at_once(bench: Bench, num_failures: int) -> None:
    async def test() -> None:
        live, there = bench.begin(), Listener(bench, bench.models.served)
        there.replay.error = LegatoError("no longer right")
        bench.journal.release()
        if num_failures:
            bench.store.num_unacknowledged = 1
            with pytest.raises(StoreUnavailable):
                await there.listen(0)
        await there.listen(0)
        state, frames = bench.stored(live)
        assert (state, len(frames)) == ("failed", 2)
        assert b"no longer right" in frames[0]

    go(test)


def test_a_busy_server_adopts_later(bench: Bench) -> None:
    async def test() -> None:
        bench.begin()
        there = Listener(bench, bench.models.served)
        bench.journal.release()
        there.replay.error = StoreUnavailable("busy")
        await there.listen(0)
        there.replay.error = None
        await there.listen(1)
        assert len(there.adopted) == 1

    go(test)


def test_what_another_has_adopted_meanwhile_is_his(bench: Bench) -> None:
    async def test() -> None:
        bench.begin()
        first, second = (Listener(bench, bench.models.served) for _ in range(2))
        bench.journal.release()
        await asyncio.gather(first.listen(0), second.listen(0))
        assert len(first.adopted) + len(second.adopted) == 1

    go(test)


def test_a_path_that_is_gone_is_no_fault_of_ours(bench: Bench) -> None:
    async def test() -> None:
        live = bench.begin()
        with pytest.raises(ModelNotFound):
            await Replay(bench.models, {}).run(live.record)
        assert [*Replay(bench.models, {}).failure(live.record, LegatoError("no"))] == [
            *failure_frames(LegatoError("no"))
        ]

    go(test)


# ---------------------------------------------------------------------------------------------------------------------
# All of them together


@asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[Generations]:
    """A server's generations."""
    supervisor = Supervisor()
    telemetry = Telemetry(bench.models, bench.store, supervisor, traces_url="")
    ledger = Ledger(bench.store, supervisor)
    pace = Pace(lease_s=0.3, beat_s=0.05, patience_s=0.1, retry_s=0.05)
    models, store, settings = bench.models, bench.store, bench.settings
    generations = Generations(store, settings, models, DIALECTS, ledger, telemetry, supervisor, pace=pace)
    async with generations.running():
        yield generations
    await supervisor.aclose()


async def start(bench: Bench, generations: Generations) -> Live:
    """Ask for an answer."""
    run = plan(openai.CompletionsDialect().parse(dict(BODY)), bench.models.resolve("m"))
    return await generations.start(ANYONE, PATH, BODY, run)


def test_what_is_deleted_while_its_end_is_written_has_ended(bench: Bench) -> None:
    async def test() -> None:
        bench.engine._script = [b"ab", Pause(0.1), b"c"]
        async with serving(bench) as generations:
            live = await start(bench, generations)
            await until(lambda: live.num_shown == 2)
            bench.store.may_write.clear()
            await until(lambda: live.end is not None)
            record = await generations.find(live.record.id, ANYONE)
            async with beside(generations.delete(record)) as deleting, beside(generations.whole(live)) as reading:
                await asyncio.sleep(0.05)
                bench.store.may_write.set()
                await deleting
                assert text_of(await reading) == "abc", "the end had come before"
            with pytest.raises(GenerationNotFound):
                await generations.find(live.record.id, ANYONE)
            assert generations._lives == {}

    go(test)


def test_what_ends_while_the_database_is_away_has_ended_when_it_is_back(bench: Bench) -> None:
    async def test() -> None:
        bench.engine._script = [b"ab", Pause(0.05), b"c"]
        async with serving(bench) as generations:
            live = await start(bench, generations)
            await until(lambda: live.num_shown == 2)
            bench.store.is_away = True
            assert b'"abc"' in await generations.whole(live)
            assert (await generations.find(live.record.id, ANYONE)).state == "running"
            with pytest.raises(StoreUnavailable):
                await start(bench, generations)
            await asyncio.sleep(0.5)
            bench.store.is_away = False
            await until(lambda: not generations._lives)
            record = await generations.find(live.record.id, ANYONE)
            assert (record.state, record.num_entries) == ("done", len(live.entries))
            (row,) = bench.store.usage()
            assert (row.requests, row.completion_tokens) == (1, 3)

    go(test)


def test_a_stream_goes_on_behind_a_write_that_was_not_acknowledged(bench: Bench) -> None:
    async def test() -> None:
        bench.engine._script = [part for _ in range(10) for part in (b"ab", Pause(0.02))]
        async with serving(bench) as generations:
            live = await start(bench, generations)
            await until(lambda: live.num_saved > 2)
            bench.store.num_unacknowledged = 1
            other = await again_until_taken(lambda: start(bench, generations))
            for one in (live, other):
                assert text_of(await generations.whole(one)) == "ab" * 10
            (row,) = bench.store.usage()
            assert (row.requests, row.completion_tokens) == (2, 40)

    go(test)


def text_of(body: bytes) -> str:
    """The text of an answer."""
    return str(json.loads(body)["choices"][0]["text"])


async def again_until_taken(ask: Callable[[], Awaitable[Live]]) -> Live:
    """Ask as often as it takes."""
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            await asyncio.sleep(0.05)
