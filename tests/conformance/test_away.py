"""A database that does not answer, or lets nobody write: who does not need it is answered at once, the others soon."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from legato.errors import StoreUnavailable
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.storage.usage import Charge, UsageRow
from tests.conformance.reading import COMPLETIONS
from tests.conformance.test_keys import bearer, wait_for_usage
from tests.conformance.test_watch import metrics
from tests.conftest import Served, children, serve_script
from tests.postgresql import serve_postgresql

SCRIPT = [b"ok"]
BODY = {"model": "m", "prompt": "x"}
AT_ONCE_S = 1.0
SOON_S = 8.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Hold the block to so many seconds."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def check_refused(answer: httpx2.Response) -> None:
    """The answer says that the database is away, and when to try again, and no more."""
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), answer.text
    assert "the server's database cannot be used now; try again in 5 s" in answer.text
    assert "locked" not in answer.text
    assert "host" not in answer.text


def ask_and_be_refused(served: Served, limited: dict[str, str]) -> httpx2.Response:
    """Ask with a key that has limits."""
    with within(SOON_S):
        return served.post(COMPLETIONS, BODY, headers=limited)


def check_at_once(served: Served, free: dict[str, str], *, ready: int) -> None:
    """Whoever does not have to write is answered at once."""
    with within(AT_ONCE_S):
        assert served.get("/health").json() == {
            "status": "ok",
            "models": {"m": {"running": 0, "waiting": 0, "restarts": 0}},
            "down": [],
        }
    with within(AT_ONCE_S):
        assert served.get("/ready").status_code == ready
    with within(AT_ONCE_S):
        assert served.post(COMPLETIONS, BODY, headers=free).json()["choices"][0]["text"] == "ok"
    with within(AT_ONCE_S):
        long = {"model": "m", "prompt": "x" * 40_000}
        assert "context" in served.post(COMPLETIONS, long, headers=free).json()["error"]["message"]


def test_another_process_holds_the_write_lock(tmp_path: Path) -> None:
    file = tmp_path / "legato.db"
    with (
        closing(Store.open(f"sqlite:///{file}")) as store,
        serve_script(SCRIPT, store=store) as served,
        closing(sqlite3.connect(file, check_same_thread=False)) as other,
        ThreadPoolExecutor(16) as clients,
    ):
        limited = bearer(store.create_key(Key("limited", requests_per_minute=1000)))
        free, admin = bearer(store.create_key(Key("free"))), bearer(store.create_key(Key("admin", admin=True)))
        other.execute("BEGIN IMMEDIATE")
        waiting = [clients.submit(ask_and_be_refused, served, limited) for _ in range(12)]
        time.sleep(0.1)
        while not all(one.done() for one in waiting):
            check_at_once(served, free, ready=200)
            assert served.get("/admin/keys", headers=admin).status_code == 200
        for one in waiting:
            check_refused(one.result())
        with within(SOON_S):
            check_refused(served.post(COMPLETIONS, {**BODY, "resumable": True}, headers=free))
        with within(SOON_S):
            check_refused(served.post("/admin/keys", {"name": "new"}, headers=admin))
        other.rollback()
        assert served.post(COMPLETIONS, BODY, headers=limited).status_code == 200
        assert wait_for_usage(store, "limited").requests == 1
        assert wait_for_usage(store, "free").requests > 1  # What could not be written was kept.


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A PostgreSQL server's URL."""
    with serve_postgresql() as url:
        yield url


@contextmanager
def silent(url: str) -> Iterator[None]:
    """Stop all processes of a PostgreSQL server: it accepts connections, and says nothing."""
    file = Path(url.partition("?host=")[2]) / "data" / "postmaster.pid"
    main = int(file.read_text().split()[0])
    pids = [main, *children(main)]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_postgresql_does_not_answer(postgresql: str) -> None:
    with (
        closing(Store.open(postgresql)) as store,
        serve_script(SCRIPT, store=store) as served,
        ThreadPoolExecutor(16) as clients,
    ):
        limited = bearer(store.create_key(Key("limited", requests_per_minute=1000)))
        free = bearer(store.create_key(Key("free")))
        for key in (limited, free):
            assert served.post(COMPLETIONS, BODY, headers=key).status_code == 200
        with silent(postgresql):
            waiting = [clients.submit(ask_and_be_refused, served, limited) for _ in range(12)]
            time.sleep(1.1)  # What is known of the keys is old now.
            while not all(one.done() for one in waiting):
                check_at_once(served, free, ready=503)
            for one in waiting:
                check_refused(one.result())
            with within(SOON_S):
                check_refused(served.post(COMPLETIONS, BODY, headers=bearer("lg-unknown")))
        deadline = time.monotonic() + 20
        while served.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert served.post(COMPLETIONS, BODY, headers=limited).status_code == 200
        assert wait_for_usage(store, "limited").requests == 2


class Faulty(Store):
    """A store in whose writing of usage there is a fault, or which is away."""

    fault: Exception | None = ZeroDivisionError("a bug")

    def record(self, rows: Iterable[UsageRow], refunds: Iterable[Charge] = ()) -> None:
        """Fail, or not."""
        if self.fault is not None:
            raise self.fault
        super().record(rows, refunds)


def test_an_end_that_nobody_asked_for_is_told_and_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Faulty.open(f"sqlite:///{tmp_path}/legato.db")) as store, serve_script(SCRIPT, store=store) as served:
        assert served.post(COMPLETIONS, BODY).status_code == 200
        time.sleep(0.7)
        for _ in range(5):
            assert served.post(COMPLETIONS, BODY).status_code == 200
        time.sleep(2)
        health = served.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["down"]) == (200, "degraded", ["usage"])
        counts = metrics(served)
        assert counts['legato_task_down{task="usage"}'] == 1
        assert counts['legato_task_restarts_total{task="usage"}'] >= 1
        store.fault = StoreUnavailable("away")  # type: ignore[attr-defined]
        assert served.post(COMPLETIONS, BODY).status_code == 200
        store.fault = None  # type: ignore[attr-defined]
        assert wait_for_usage(store, "").requests == 7
        assert served.get("/health").json()["status"] == "ok"
        assert metrics(served)['legato_task_down{task="usage"}'] == 0
    assert "usage has ended: ZeroDivisionError: a bug; it is started again in 0.1 s" in caplog.messages
