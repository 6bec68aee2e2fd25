"""More than the server can take (`C...`): full queues, callers who flood, deadlines, clients that do not read, and
hundreds of silent streams.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from legato.config import LimitSettings, ServerSettings, StoreSettings
from legato.dialects.base import Encoder, Facts
from legato.dialects.openai import CompletionsDialect
from legato.dialects.openai_responses import OPENAI
from legato.engines.scripted import Pause, Script, ScriptedEngine
from legato.errors import LegatoError
from legato.run.admission import Admission
from legato.run.models import Model, Models
from legato.server import streaming
from legato.server.access import Access
from legato.server.generate import Generation
from legato.server.generations import Generations
from legato.server.ledger import Ledger
from legato.server.middleware import Gate, GatedEndpoint, TelemetryMiddleware
from legato.server.telemetry import Telemetry
from legato.storage.store import Store
from legato.system.supervisor import Supervisor
from legato.types import Accepted, Answer, CompletionRequest, Delta, Finished, Job, Usage
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    body_for,
    check_error,
    check_error_body,
    eventually,
    fold,
    is_established,
    is_idle,
    num_running,
    num_sockets,
    own_threads,
    read_events,
    stream,
    text_of,
    user,
)
from tests.conftest import NO_TLS, Served, empty_store, serve_script

BOTH = [COMPLETIONS, CHAT]


def ask(served: Served, body: dict[str, Any], *, path: str = COMPLETIONS, receive_bytes: int = 0) -> socket.socket:
    """Send a request over a connection of its own, and do not read."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(30)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    data = bytearray()
    while piece := connection.recv(1 << 16):
        data += piece
    return bytes(data)


@contextmanager
def watched_health(served: Served) -> Iterator[list[float]]:
    """Ask for the server's health all the time; gather how long each answer took."""
    times: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with httpx2.Client(base_url=served.url, verify=NO_TLS) as client:
            while not done.is_set():
                started = time.monotonic()
                assert client.get("/health").status_code == 200
                times.append(time.monotonic() - started)
                time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield times
    finally:
        done.set()
        watcher.join()


def p99(times: Sequence[float]) -> float:
    """The time that all but one in a hundred keep."""
    return sorted(times)[int(0.99 * (len(times) - 1))]


# ---------------------------------------------------------------------------------------------------------------------
# A full queue


@contextmanager
def occupied(served: Served) -> Iterator[None]:
    """Hold one place for as long as the context is open."""
    body = body_for(served, COMPLETIONS, prompt="hold", stream=True)
    with httpx2.stream("POST", served.url + COMPLETIONS, json=body, verify=NO_TLS) as response:
        assert response.status_code == 200
        yield


def slow_if_held(job: Any) -> list[bytes | Pause]:
    """Hold a place for long if asked to, otherwise for a moment."""
    return [Pause(30)] if job.prompt.prefix == "hold" else [Pause(0.02), b"ok"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c075_a_full_queue_is_429_at_once(path: str, streamed: bool) -> None:
    admission = Admission(max_running=1, max_waiting=0)
    with serve_script(slow_if_held, admission=admission) as served:
        with occupied(served):
            started = time.monotonic()
            answer = served.post(path, body_for(served, path, stream=streamed))
            assert time.monotonic() - started < 5
            error = check_error(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) > 0
        assert eventually(lambda: is_idle(served))
        assert text_of(served.complete("x")) == "ok"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c075_choices_that_do_not_all_find_room_are_turned_away_together(path: str, streamed: bool) -> None:
    with serve_script([b"ok"], admission=Admission(max_running=1, max_waiting=2)) as served:
        check_error(served.post(path, body_for(served, path, n=4, stream=streamed)), 429)
        assert is_idle(served)
        assert served.post(path, body_for(served, path, n=3, stream=streamed)).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_c075_a_place_that_does_not_come_free_is_503(streamed: bool) -> None:
    admission = Admission(max_running=1, max_waiting=5, max_wait_s=0.2)
    with serve_script(slow_if_held, admission=admission) as served:
        with occupied(served):
            answer = served.post(COMPLETIONS, body_for(served, COMPLETIONS, stream=streamed))
            error = check_error(answer, 503)
            assert (error["type"], error["code"]) == ("server_error", "overloaded")
            assert int(answer.headers["retry-after"]) > 0
            assert num_running(served) == 1
        assert eventually(lambda: is_idle(served))


def test_c075_those_who_wait_are_served_in_order() -> None:
    order: list[str] = []

    def note(job: Any) -> list[bytes | Pause]:
        order.append(job.prompt.prefix)
        return [Pause(2 if job.prompt.prefix == "first" else 0), b"ok"]

    with serve_script(note, admission=Admission(max_running=1)) as served:
        threads = []
        for index, prompt in enumerate(["first", "b", "c", "d"]):
            threads.append(threading.Thread(target=served.complete, args=[prompt]))
            threads[-1].start()
            assert eventually(lambda number=index: num_running(served) > number)  # type: ignore[misc]
        for thread in threads:
            thread.join()
    assert order == ["first", "b", "c", "d"]


def test_c075_every_one_of_a_flood_is_answered_or_turned_away() -> None:
    admission = Admission(max_running=8, max_waiting=16)
    with serve_script(slow_if_held, admission=admission) as served:
        with watched_health(served) as times, ExitStack() as stack:
            body = body_for(served, COMPLETIONS)
            connections = [
                stack.enter_context(ask(served, {**body, "stream": number % 2 == 0, "n": 1 + number % 3}))
                for number in range(400)
            ]
            answers = [read_all(connection).decode() for connection in connections]
        heads = [answer.partition("\r\n\r\n")[0].lower() for answer in answers]
        statuses = [head.split()[1] for head in heads]
        assert set(statuses) == {"200", "429"}
        for head, status, answer in zip(heads, statuses, answers, strict=True):
            assert ("\r\nretry-after: 5" in head) == (status == "429")
            assert status == "429" or '"ok"' in answer or '"o"' in answer
        assert p99(times) < 0.5
        assert eventually(lambda: is_idle(served))
        assert text_of(served.chat(user("x"))) == "ok"


def test_callers_are_told_apart_by_their_keys() -> None:
    order: list[str] = []

    def note(job: Job) -> Script:
        order.append(job.prompt.prefix)
        return [Pause(2 if job.prompt.prefix == "first" else 0), b"ok"]

    keys = ServerSettings(port=0, api_keys=("one", "two"))
    with serve_script(note, admission=Admission(max_running=1), server=keys) as served:

        def complete(prompt: str, key: str) -> None:
            answer = served.post(
                COMPLETIONS, body_for(served, COMPLETIONS, prompt=prompt), headers={"authorization": f"Bearer {key}"}
            )
            assert text_of(answer.json()) == "ok"

        threads = []
        asked = [("first", "one"), ("1b", "one"), ("1c", "one"), ("1d", "one"), ("2a", "two"), ("2b", "two")]
        for index, prompt_and_key in enumerate(asked):
            threads.append(threading.Thread(target=complete, args=prompt_and_key))
            threads[-1].start()
            assert eventually(lambda number=index: num_running(served) > number)  # type: ignore[misc]
        for thread in threads:
            thread.join()
    assert order == ["first", "1b", "2a", "1c", "2b", "1d"]


# ---------------------------------------------------------------------------------------------------------------------
# Streams that wait


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_c058_a_stream_that_waits_for_a_place_is_kept_alive(path: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with serve_script(slow_if_held, admission=Admission(max_running=1)) as served:
        with occupied(served), httpx2.Client(base_url=served.url, verify=NO_TLS) as client:
            body = body_for(served, path, stream=True, n=n)
            with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                assert response.headers["legato-seed"] == "7"
                pieces = response.iter_raw()
                silence = b"".join(next(pieces) for _ in range(4))
        assert silence == b": keep-alive\n\n" * 4
        assert eventually(lambda: is_idle(served))
        with occupied(served):
            connection = ask(served, body, path=path)
            assert b": keep-alive" in connection.recv(10_000) + connection.recv(10_000)
        with connection:
            data = read_all(connection)
        assert all(data.count(b'"%c"' % letter) == n for letter in b"ok"), "a token is a byte"
        assert b"data: [DONE]\n\n" in data


@pytest.mark.parametrize("path", BOTH)
def test_c058_after_the_first_comment_a_refusal_is_an_event(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with serve_script(slow_if_held, admission=Admission(max_running=1, max_wait_s=0.3)) as served:
        with occupied(served):
            response = served.post(path, body_for(served, path, stream=True))
            assert response.status_code == 200
            (error,) = read_events(response.content)
            assert response.content.startswith(b": keep-alive")
            assert check_error_body(error)["code"] == "overloaded"
            check_error(served.post(path, body_for(served, path)), 503)
        assert eventually(lambda: is_idle(served))


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_ends_at_its_deadline_with_what_there_is(path: str, streamed: bool, n: int) -> None:
    with serve_script([b"one ", Pause(0.05), b"two", Pause(30), b" three"]) as served:
        body = body_for(served, path, n=n, timeout_s=0.4, max_tokens=100, stop=["two three"])
        started = time.monotonic()
        answer = fold(stream(served, path, body)) if streamed else served.post(path, body).json()
        assert 0.3 < time.monotonic() - started < 10
        for index, choice in enumerate(answer["choices"]):
            assert (choice["text"] if streamed else text_of(answer, index)) == "one two"
            assert choice["finish_reason"] == "length"
        assert eventually(lambda: is_idle(served))
        assert served.engine.counters()["cancelled"] == n


def test_a_deadline_before_the_first_token_leaves_the_text_as_it_is() -> None:
    with serve_script([Pause(30)]) as served:
        answer = served.complete("Once", timeout_s=0.1, echo=True)
        assert text_of(answer) == "Once"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_deadline_that_passes_while_waiting_is_503(streamed: bool) -> None:
    with serve_script(slow_if_held, admission=Admission(max_running=1)) as served:
        with occupied(served):
            body = body_for(served, COMPLETIONS, stream=streamed, timeout_s=0.2, n=2)
            started = time.monotonic()
            answer = served.post(COMPLETIONS, body)
            assert time.monotonic() - started < 5
            assert "within 0.2 s" in check_error(answer, 503)["message"]
            assert int(answer.headers["retry-after"]) > 0
        assert eventually(lambda: is_idle(served))


def test_at_the_deadline_a_choice_that_got_no_place_is_empty() -> None:
    with serve_script([b"text", Pause(30)], admission=Admission(max_running=1)) as served:
        answer = served.complete("x", n=2, timeout_s=0.2)
        assert [text_of(answer, index) for index in (0, 1)] == ["text", ""]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert eventually(lambda: is_idle(served))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("value", [0, -1, "1", True, [1]])
def test_a_deadline_must_be_a_number_above_0(path: str, value: Any) -> None:
    with serve_script([b"ok"]) as served:
        answer = served.post(path, body_for(served, path, timeout_s=value))
        assert "must be a number > 0, got" in check_error(answer, 400, "timeout_s")["message"]


def test_a_text_that_was_cut_by_its_deadline_goes_on_as_if_it_had_not_been(small: Served) -> None:
    prompt = "Once upon a time"
    cut = small.complete(prompt, timeout_s=0.4, max_tokens=4000)
    num = cut["usage"]["completion_tokens"]
    assert 0 < num < 4000
    assert eventually(lambda: is_idle(small))
    rest = small.complete(prompt + text_of(cut), max_tokens=8)
    assert text_of(small.complete(prompt, max_tokens=num + 8)).startswith(text_of(cut) + text_of(rest)[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# Clients that do not read


class Flood(Sequence[bytes]):
    """A script of parts of 100 bytes, which counts those that were played. Each byte is a token, and an event."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_played = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        if index >= self.num:
            raise IndexError
        self.num_played = max(self.num_played, index + 1)
        return b"x" * 100


LONG = {"context_length": 10_000_000}


@pytest.mark.alone
def test_a_client_that_does_not_read_holds_nobody_and_loses_its_place() -> None:
    flood = Flood(50_000)
    with serve_script(
        lambda job: flood if job.prompt.prefix == "flood" else [b"ok"],
        admission=Admission(max_running=2),
        limits=LimitSettings(write_timeout_s=3),
        **LONG,
    ) as served:
        body = body_for(served, COMPLETIONS, prompt="flood", stream=True, max_tokens=5_000_000)
        with ask(served, body, receive_bytes=4096) as connection:
            assert eventually(lambda: flood.num_played > 0)
            started = time.monotonic()
            while time.monotonic() - started < 0.7:
                assert num_running(served) == 1
                before = time.monotonic()
                assert text_of(served.complete("x")) == "ok"
                assert time.monotonic() - before < 1
            assert flood.num_played < 50, "what is not read is not made"
            assert eventually(lambda: is_idle(served), 10)
            assert served.engine.counters()["cancelled"] == 1
            assert not read_all(connection).endswith(b"0\r\n\r\n")


def test_the_choices_of_a_client_that_does_not_read_end_and_free_their_places() -> None:
    flood = Flood(100)
    with serve_script(flood, admission=Admission(max_running=2), **LONG) as served:
        body = body_for(served, COMPLETIONS, stream=True, max_tokens=10_000, n=2)
        with ask(served, body, receive_bytes=4096):
            assert eventually(lambda: flood.num_played == 100, 30)
            assert eventually(lambda: is_idle(served), 10)
            assert text_of(served.complete("x", max_tokens=4)) == "xxxx"


def test_a_whole_answer_that_is_not_read_is_not_kept() -> None:
    with (
        serve_script(Flood(3000), limits=LimitSettings(write_timeout_s=0.3), **LONG) as served,
        ask(served, body_for(served, COMPLETIONS, max_tokens=300_000), receive_bytes=4096) as connection,
    ):
        assert eventually(lambda: served.engine.counters()["running"] == 1)
        assert is_established(connection)
        assert eventually(lambda: is_idle(served), 60), "the place is free when the answer is made"
        assert eventually(lambda: not is_established(connection), 10), "the server has closed"
        assert not read_all(connection).endswith(b"}")


def test_a_client_that_reads_slowly_gets_all() -> None:
    with serve_script(Flood(30), limits=LimitSettings(write_timeout_s=0.4), **LONG) as served:
        body = body_for(served, COMPLETIONS, stream=True, max_tokens=10_000)
        with ask(served, body, receive_bytes=4096) as connection:
            data = bytearray()
            started = time.monotonic()
            while piece := connection.recv(5000):
                data += piece
                time.sleep(0.02)
            assert time.monotonic() - started > 1.5, "longer than the limit for one write"
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert data.count(b'"x"') == 3000
        assert eventually(lambda: is_idle(served))


# ---------------------------------------------------------------------------------------------------------------------
# Silent streams


@pytest.mark.alone
def test_three_hundred_silent_streams_cost_little_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 1.0)
    num = 300

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def costs() -> tuple[int, int, int]:
        return num_sockets(), len(asyncio.all_tasks(served.loop)), len(own_threads())

    def open_all(stack: ExitStack) -> None:
        """Hold as many streams, a fifth of them running, until each has had two comments."""
        body = body_for(served, COMPLETIONS, stream=True)
        silent = {stack.enter_context(ask(served, body, path=COMPLETIONS)): b"" for _ in range(num)}
        poll = select.poll()
        by_number = {connection.fileno(): connection for connection in silent}
        for number in by_number:
            poll.register(number, select.POLLIN)
        end = time.monotonic() + 8
        while any(data.count(b": keep-alive") < 2 for data in silent.values()):
            assert time.monotonic() < end
            for number, _ in poll.poll(1000):
                silent[by_number[number]] += by_number[number].recv(4096)
        assert all(data.startswith(b"HTTP/1.1 200 ") for data in silent.values())

    with serve_script([Pause(60)]) as served:
        with ExitStack() as stack:  # What is only allocated once.
            open_all(stack)
        assert eventually(lambda: is_idle(served), 5)
        before, memory = costs(), resident()
        with watched_health(served) as times, ExitStack() as stack:
            open_all(stack)
            counts = served.get("/health").json()["models"]["m"]
            assert (counts["running"], counts["waiting"]) == (64, num - 64)
            assert resident() - memory < num * 256 * 1024
        assert p99(times) < 0.5
        assert eventually(lambda: is_idle(served), 5)
        assert eventually(lambda: all(now <= then for now, then in zip(costs(), before, strict=True)), 5), costs()


# ---------------------------------------------------------------------------------------------------------------------
# A bug of ours


@pytest.mark.alone
def test_a_large_body_does_not_hold_up_the_others() -> None:
    """It is read in a thread: what is left on the event loop are single calls of it, which are no half of the whole."""

    async def longest_gap(stop: threading.Event) -> float:
        clock = asyncio.get_running_loop().time
        longest, last = 0.0, clock()
        while not stop.is_set():
            await asyncio.sleep(0.002)
            now = clock()
            longest, last = max(longest, now - last), now
        return longest

    with serve_script([b"x"]) as served:
        body = {"model": "m", "prompt": [97] * 1_000_000}
        stop = threading.Event()
        gap = asyncio.run_coroutine_threadsafe(longest_gap(stop), served.loop)
        begun = time.monotonic()
        check_error(served.post(COMPLETIONS, body), 400, "prompt")
        took = time.monotonic() - begun
        stop.set()
        assert gap.result(10) < took / 2


class Broken:
    """An encoder that fails at an event."""

    def __init__(self, encoder: Encoder, at: int) -> None:
        self._encoder = encoder
        self._left = at

    def start(self) -> Iterator[bytes]:
        return self._encoder.start()

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError
        return self._encoder.event(event)

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        return self._encoder.end(usage, facts)

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        return self._encoder.failure(error)

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        raise ZeroDivisionError


class BrokenDialect(CompletionsDialect):
    """A dialect whose encoder fails at an event."""

    def __init__(self, at: int) -> None:
        self._at = at

    def encoder(self, request: CompletionRequest) -> Encoder:
        return Broken(super().encoder(request), self._at)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [0, 2, None])
def test_a_bug_in_the_encoder_costs_no_place(at: int | None, n: int) -> None:
    """At the first event, in the middle of a stream, and where nothing is streamed."""

    async def check(store: Store) -> None:
        engine = ScriptedEngine([b"a", Pause(0.01), b"b", Pause(0.01 if at is None else 30)])
        model = Model("m", engine, Admission(max_running=n))
        supervisor = Supervisor()
        gate = Gate(ServerSettings(), LimitSettings(), Access((), store, supervisor))
        dialect = BrokenDialect(at or 0)
        models = Models({"m": model}, {})
        telemetry = Telemetry(models, store, supervisor, traces_url="")
        ledger = Ledger(store, supervisor)
        generations = Generations(store, StoreSettings(), models, {}, ledger, telemetry, supervisor)
        generation = Generation(COMPLETIONS, dialect, models, gate, ledger, telemetry, generations)
        app = TelemetryMiddleware(GatedEndpoint(gate, COMPLETIONS, OPENAI.encode_error, generation), telemetry)
        body = json.dumps({"model": "m", "prompt": "x", "stream": at is not None, "n": n}).encode()
        requests: asyncio.Queue[Any] = asyncio.Queue()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope: Any = {"type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode()}
        scope |= {"headers": [(b"host", b"localhost")], "extensions": {}}
        await app(scope, requests.get, send)
        assert sent[0]["status"] == (200 if at == 2 else 500)
        assert bool(sent[-1].get("more_body")) == (at == 2), "a stream that has begun does not end as if it were whole"
        assert (model.admission.num_running, model.admission.num_waiting) == (0, 0)
        assert engine.counters()["running"] == 0

    with empty_store() as store:
        asyncio.run(check(store))
