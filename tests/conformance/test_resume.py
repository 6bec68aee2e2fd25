"""Resumable answers: they survive their client, its connection, the server and its process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa

from legato.config import ServerSettings, StoreSettings
from legato.engines.scripted import Fault, Pause, Script
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.types import Job
from tests.conformance.reading import CHAT, COMPLETIONS, check_error, together, user
from tests.conformance.routes import OPENAI_SHAPED, body_on
from tests.conformance.vendors import MISTRAL
from tests.conftest import NO_TLS, SMALL, Served, serve_process, serve_script, weights
from tests.postgresql import serve_postgresql
from tests.tokenizers import write_tokenizer

TEXT = " ".join(f"w{num}" for num in range(100))[:198]
NUM_EVENTS = 200
"""One for each character, which is a token to the script; then the finish reason, and the end."""


def words(job: Job) -> Script:
    """A text of many words that goes on where it was interrupted; a prompt that begins with "slow" gets it slowly."""
    rest = TEXT.encode()[job.num_resumed :]
    pause = [Pause(0.1)] if "slow" in job.prompt.prefix else []
    return [part for word in re.findall(rb"\S+\s*|\s+", rest) for part in (word, *pause)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with keys."""
    settings = ServerSettings(port=0, api_keys=("mine", "yours"))
    with serve_script(words, server=settings) as served:
        yield served


MINE = {"Authorization": "Bearer mine"}


def body(**fields: Any) -> dict[str, Any]:
    """A resumable request for the whole text."""
    return {"model": "m", "prompt": "go ", "max_tokens": 2000, "stream": True, "resumable": True, **fields}


Event = tuple[int, str]
"""The number and the data of an event."""


def events(lines: Iterator[str], most: int | None = None) -> list[Event]:
    """Read events, at most so many; each has a number and data, in this order."""
    found: list[Event] = []
    while most is None or len(found) < most:
        line = next((line for line in lines if line and not line.startswith(":")), None)
        if line is None:
            break
        assert line.startswith("id: "), line
        data = next(lines)
        assert data.startswith("data: "), data
        found.append((int(line[4:]), data[6:]))
    return found


@contextmanager
def opened(
    url: str, path: str, *, post: Any = None, headers: Mapping[str, str] = MINE, **options: Any
) -> Iterator[Iterator[str]]:
    """Open a stream; leaving the context drops the connection."""
    method = "GET" if post is None else "POST"
    with (
        httpx2.Client(verify=NO_TLS, timeout=60, headers=dict(headers)) as client,
        client.stream(method, url + path, json=post, **options) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


def id_of(found: Sequence[Event]) -> str:
    """The id of a generation, which every chunk has."""
    (id,) = {json.loads(data)["id"] for _, data in found if data != "[DONE]"}
    return str(id)


def text_of(found: Sequence[Event]) -> str:
    """The text of a stream."""
    chunks = [json.loads(data)["choices"][0] for _, data in found if data != "[DONE]"]
    return "".join(chunk["text"] if "text" in chunk else chunk["delta"].get("content", "") for chunk in chunks)


def settled(served: Served, id: str, **wanted: Any) -> dict[str, Any]:
    """Return what is said of a generation, as soon as it has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown: dict[str, Any] = served.get(f"/v1/generations/{id}", headers=MINE).json()
        if shown["status"] != "running":
            return shown
        time.sleep(0.05)
    raise AssertionError(shown)


# ---------------------------------------------------------------------------------------------------------------------
# The client comes back


@pytest.mark.timeout(300)
def test_a_client_that_drops_the_socket_after_any_event_misses_nothing(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body()) as lines:
        whole = events(lines)
    assert text_of(whole) == TEXT
    assert [num for num, _ in whole] == [*range(1, NUM_EVENTS + 1)]
    with opened(served.url, COMPLETIONS, post=body()) as lines:
        found = events(lines, 1)
    id = id_of(found)
    while found[-1][1] != "[DONE]":
        with opened(served.url, f"/v1/generations/{id}/events?after={len(found)}") as lines:
            found += events(lines, 1)
    assert [num for num, _ in found] == [num for num, _ in whole]
    assert text_of(found) == TEXT
    again = settled(served, id)
    assert again["num_events"] == len(whole)
    assert again["answer"]["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("path", [path for path in OPENAI_SHAPED if path != MISTRAL])
def test_every_dialect_that_knows_the_field_can_be_resumed(served: Served, path: str) -> None:
    asked = {**body_on(path, 9, stream=True), "resumable": True}
    with opened(served.url, path, post=asked) as lines:
        found = events(lines)
    with opened(served.url, f"/v1/generations/{id_of(found)}/events") as lines:
        assert events(lines) == found
    assert text_of(found) == TEXT[:9]


def test_a_browser_says_by_itself_where_it_was(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body(max_tokens=20)) as lines:
        found = events(lines)
    headers = {**MINE, "Last-Event-ID": "3"}
    with opened(served.url, f"/v1/generations/{id_of(found)}/events", headers=headers) as lines:
        assert events(lines) == found[3:]


def test_an_answer_that_is_not_streamed_is_kept_too(served: Served) -> None:
    answer = served.post(COMPLETIONS, body(stream=False, max_tokens=20), headers=MINE)
    assert answer.status_code == 200
    shown = settled(served, answer.json()["id"])
    assert shown["answer"] == answer.json()
    assert shown["status"] == "done"
    assert shown["created"] == answer.json()["created"]


def test_a_stream_is_what_it_would_be_without_the_field(served: Served) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "go "}), (CHAT, {"messages": [user("go")]})):
        asked = {"model": "m", "max_tokens": 30, "stream": True, "report": True, **fields}
        asked["stream_options"] = {"include_usage": True}
        with opened(served.url, path, post={**asked, "resumable": True}) as lines:
            with_ids = [data for _, data in events(lines)]
        with opened(served.url, path, post=asked) as lines:
            plain = [line[6:] for line in lines if line]

        def same(data: str) -> str:
            return re.sub(r'"id":"[^"]*"|"created":\d+|"seed":\d+', "", data)

        assert [same(data) for data in with_ids] == [same(data) for data in plain]


def test_another_server_serves_the_events(served: Served) -> None:
    settings = ServerSettings(port=0, api_keys=("mine",))
    with serve_script(words, server=settings, store=served.store) as other:
        with opened(served.url, COMPLETIONS, post=body(prompt="slow ")) as lines:
            found = events(lines, 5)
        with opened(other.url, f"/v1/generations/{id_of(found)}/events?after=5") as lines:
            found += events(lines)
    assert text_of(found) == TEXT


def test_servers_share_a_postgresql_database() -> None:
    """One serves what the other writes, and takes it over when that stops."""
    with ExitStack() as stack:
        url = stack.enter_context(serve_postgresql())
        stores = [stack.enter_context(closing(Store.open(url))) for _ in range(2)]
        other = stack.enter_context(serve_script(words, store=stores[1]))
        with serve_script(words, store=stores[0]) as served:
            with opened(served.url, COMPLETIONS, post=body(prompt="slow "), headers={}) as lines:
                found = events(lines, 5)
            path = f"/v1/generations/{id_of(found)}/events?after="
            with opened(other.url, f"{path}{len(found)}", headers={}) as lines:
                found += events(lines, 20)
        with opened(other.url, f"{path}{len(found)}", headers={}) as lines:
            found += events(lines)
        assert other.engine.counters()["running"] == 0
    assert [num for num, _ in found] == [*range(1, NUM_EVENTS + 1)]
    assert text_of(found) == TEXT


# ---------------------------------------------------------------------------------------------------------------------
# What runs, goes on and ends


def test_without_a_client_it_goes_on_for_a_while_only() -> None:
    with serve_script(words, journals=StoreSettings(resume_window_s=0.5)) as served:
        script = body(prompt="slow " * 3)
        with opened(served.url, COMPLETIONS, post=script, headers={}) as lines:
            found = events(lines, 3)
        shown = settled(served, id_of(found))
        assert shown["status"] == "cancelled"
        assert 3 < shown["num_events"] < NUM_EVENTS
        assert served.engine.counters()["running"] == 0


def test_a_generation_goes_on_without_the_text(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body(max_tokens=20)) as lines:
        found = events(lines)
    seen = []

    def note(job: Job) -> Script:
        seen.append(job.prompt.prefix)
        return [b"!"]

    served.engine._script = note
    try:
        for _ in range(2):
            path = f"/v1/generations/{id_of(found)}/continue"
            with opened(served.url, path, post={"max_tokens": 5}) as lines:
                found = events(lines)
        answer = served.post(f"/v1/generations/{id_of(found)}/continue", {"stream": False}, headers=MINE)
    finally:
        served.engine._script = words
    assert answer.json()["choices"][0]["text"] == "!"
    assert seen == [f"go {TEXT[:20]}", f"go {TEXT[:20]}!", f"go {TEXT[:20]}!!"]


def test_a_chat_goes_on_inside_its_message(served: Served) -> None:
    asked = {"model": "m", "messages": [user("Hi")], "max_tokens": 10, "resumable": True}
    first = served.post(CHAT, asked, headers=MINE).json()
    seen = []

    def note(job: Job) -> Script:
        seen.append(job.prompt.prefix)
        return [b"!"]

    served.engine._script = note
    try:
        second = served.post(f"/v1/generations/{first['id']}/continue", {}, headers=MINE).json()
    finally:
        served.engine._script = words
    assert seen == [TEXT[:10]]
    assert second["choices"][0]["message"]["content"] == "!"


def test_a_generation_is_deleted(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body(prompt="slow ")) as lines:
        id = id_of(events(lines, 2))
        path = f"{served.url}/v1/generations/{id}"
        assert httpx2.delete(path, headers=MINE, verify=NO_TLS).json() == {"id": id, "deleted": True}
    assert httpx2.get(path, headers=MINE, verify=NO_TLS).status_code == 404
    deadline = time.monotonic() + 5
    while served.engine.counters()["running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.engine.counters()["running"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_key_sees_nothing_of_another_ones_generations(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body(max_tokens=20)) as lines:
        id = id_of(events(lines))
    yours = {"Authorization": "Bearer yours"}
    for method, end in (("GET", ""), ("GET", "/events"), ("POST", "/continue"), ("DELETE", "")):
        path = f"{served.url}/v1/generations/{id}{end}"
        refused = httpx2.request(method, path, headers=yours, content=b"{}", verify=NO_TLS)
        assert check_error(refused, 404)["code"] == "generation_not_found"
    assert served.get(f"/v1/generations/{id}", headers=MINE).status_code == 200
    assert len(id) >= 32, "nobody guesses it"


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_several_choices_are_not_resumable(served: Served, fields: dict[str, Any]) -> None:
    error = check_error(served.post(COMPLETIONS, body(**fields), headers=MINE), 400, "resumable")
    assert "one prompt and one choice" in error["message"]


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"model": "m"}, {"resumable": False}])
def test_what_a_generation_is_made_of_stays(served: Served, fields: dict[str, Any]) -> None:
    id = served.post(COMPLETIONS, body(stream=False, max_tokens=3), headers=MINE).json()["id"]
    (name,) = fields
    check_error(served.post(f"/v1/generations/{id}/continue", fields, headers=MINE), 400, name)


def test_what_runs_cannot_go_on_yet(served: Served) -> None:
    with opened(served.url, COMPLETIONS, post=body(prompt="slow ")) as lines:
        id = id_of(events(lines, 2))
        refused = served.post(f"/v1/generations/{id}/continue", {}, headers=MINE)
    assert check_error(refused, 409)["code"] == "generation_not_done"


@pytest.mark.parametrize("query", ["after=-1", "after=x", "after=", "after=99999999999", "before=1"])
def test_a_place_that_is_none(served: Served, query: str) -> None:
    id = served.post(COMPLETIONS, body(stream=False, max_tokens=3), headers=MINE).json()["id"]
    check_error(served.get(f"/v1/generations/{id}/events?{query}", headers=MINE), 400, query.split("=")[0])


@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_before_it_begins_has_its_own_status(stream: bool) -> None:
    def fail(job: Job) -> Script:
        return [Fault("no")]

    with serve_script(fail) as served:
        assert served.post(COMPLETIONS, body(stream=stream)).status_code == 500
        with served.store.reading() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM generations")).scalar() == 0


def test_what_fails_later_says_so_to_everybody() -> None:
    with serve_script([b"a", b"b", Fault("no")]) as served:
        with opened(served.url, COMPLETIONS, post=body(), headers={}) as lines:
            found = events(lines)
        id = json.loads(found[0][1])["id"]
        with opened(served.url, f"/v1/generations/{id}/events", headers={}) as lines:
            assert events(lines) == found
        assert json.loads(found[2][1])["error"]["code"] == "generation_failed"
        shown = served.get(f"/v1/generations/{id}").json()
    assert (shown["status"], shown["answer"]) == ("failed", None)


# ---------------------------------------------------------------------------------------------------------------------
# Room


def test_old_journals_make_room_and_running_ones_do_not() -> None:
    with serve_script(words, journals=StoreSettings(journal_bytes=50_000)) as served:
        ids = [served.post(COMPLETIONS, body(stream=False)).json()["id"] for _ in range(3)]
        statuses = [served.get(f"/v1/generations/{id}").status_code for id in ids]
        assert (statuses[0], statuses[-1]) == (404, 200)
    with serve_script(words, journals=StoreSettings(journal_bytes=100)) as served:
        refused = served.post(COMPLETIONS, body())
        assert check_error(refused, 503)["code"] == "journal_full"
        assert refused.headers["retry-after"] == "60"
        assert served.post(COMPLETIONS, body(resumable=False, stream=False)).status_code == 200


def test_what_runs_does_not_grow_beyond_the_room() -> None:
    """It ends with an error that all its readers get, and makes room."""
    with serve_script(words, journals=StoreSettings(journal_bytes=8_000)) as served:
        with opened(served.url, COMPLETIONS, post=body(prompt="slow "), headers={}) as lines:
            found = events(lines)
        assert json.loads(found[-2][1])["error"]["code"] == "journal_full"
        assert found[-1][1] == "[DONE]"
        assert TEXT.startswith(text_of(found[:-2]))
        id = id_of(found[:-2])
        with opened(served.url, f"/v1/generations/{id}/events", headers={}) as lines:
            assert events(lines) == found
        assert served.get(f"/v1/generations/{id}").json()["status"] == "failed"
        with served.store.reading() as connection:
            assert connection.execute(sa.text("SELECT num_bytes FROM room")).scalar_one() <= 8_000
        whole = served.post(COMPLETIONS, body(stream=False, max_tokens=25))
        assert (whole.status_code, served.get(f"/v1/generations/{id}").status_code) == (200, 404)


def test_a_full_disk_stops_new_ones_only(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store, serve_script(words, store=store) as served:
        limits: list[int] = []

        @sa.event.listens_for(store._engine, "begin")
        def fill(connection: sa.Connection) -> None:
            for most in limits:
                connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

        with opened(served.url, COMPLETIONS, post=body(prompt="slow "), headers={}) as lines:
            found = events(lines, 5)
            limits.append(1)  # Which sets it to the size that the file has.
            time.sleep(1)
            refused = served.post(COMPLETIONS, body(prompt="x" * 4000))
            assert check_error(refused, 503)["code"] == "store_unavailable"
            found += events(lines, 100)
            limits[:] = [1_000_000]
            found += events(lines)
        assert text_of(found) == TEXT
        time.sleep(2)
        with opened(served.url, f"/v1/generations/{id_of(found)}/events", headers={}) as lines:
            assert events(lines) == found, "what could not be journaled has been since"


def test_what_is_old_is_removed(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        with serve_script(words, store=store) as served:
            id = served.post(COMPLETIONS, body(stream=False)).json()["id"]
        time.sleep(1.1)
        with serve_script(words, store=store, journals=StoreSettings(retention_s=0)) as served:
            deadline = time.monotonic() + 10
            while served.get(f"/v1/generations/{id}").status_code == 200 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert served.get(f"/v1/generations/{id}").status_code == 404
        with store.reading() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM entries")).scalar() == 0


# ---------------------------------------------------------------------------------------------------------------------
# The server dies

_PROGRAM = """
import asyncio, sys
from tests.conformance.test_resume import main
asyncio.run(main(*sys.argv[1:]))
"""


async def main(url: str) -> None:
    """Serve the words from a process of its own, until it is killed."""
    import asyncio

    from legato.config import LimitSettings
    from legato.engines.scripted import ScriptedEngine
    from legato.run.admission import Admission
    from legato.run.models import Model, Models
    from legato.server.app import create_app
    from legato.server.run import listen, run_app

    settings = ServerSettings(port=0)
    with closing(Store.open(url)) as store, listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"http://{host}:{port}\n")
        sys.stdout.flush()
        models = Models({"m": Model("m", ScriptedEngine(words), Admission())}, {})
        app = create_app(models, store, settings, LimitSettings())
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await run_app(app, listener, LimitSettings(grace_s=1), stop=stop)


@contextmanager
def process(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `main` in a process; give its address."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, url], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


NUM_DEATHS = 4
"""Of a server, one after the other, while the same generations run."""


@pytest.mark.timeout(900)
def test_a_server_that_dies_loses_no_generation(num_crashes: int, tmp_path: Path) -> None:
    """At random moments, of several generations at once; what a client was told stays, and the rest follows."""

    def run(death: tuple[signal.Signals, int]) -> None:
        number, turn = death
        folder = tmp_path / f"{number.name}-{turn}"
        folder.mkdir()
        die(f"sqlite:///{folder}/legato.db", number, random.Random(100 * number + turn))

    turns = range(-(-num_crashes // NUM_DEATHS))
    together(run, [(number, turn) for number in (signal.SIGKILL, signal.SIGTERM) for turn in turns], 4)


def die(url: str, number: signal.Signals, moments: random.Random) -> None:
    """Kill a server some times under generations, and read them in what is started then."""
    found: dict[int, list[Event]] = {0: [], 1: [], 2: []}
    with process(url) as (server, address):

        def read(at: int) -> None:
            try:
                with opened(address, COMPLETIONS, post=body(prompt=f"slow {at} "), headers={}) as lines:
                    for _ in range(NUM_EVENTS):
                        found[at] += events(lines, 1)
            except httpx2.HTTPError:
                pass

        readers = [threading.Thread(target=read, args=(at,)) for at in found]
        for reader in readers:
            reader.start()
        while not all(found.values()):
            time.sleep(0.01)
        time.sleep(moments.uniform(0.1, 2))
        os.kill(server.pid, number)
        for reader in readers:
            reader.join()
    for _ in range(NUM_DEATHS - 1):
        with process(url) as (server, address):
            time.sleep(moments.uniform(0.5, 7))
            os.kill(server.pid, number)
            server.wait()
    with process(url) as (server, address):
        for told in found.values():
            id = id_of(told)
            assert len(told) < NUM_EVENTS
            with opened(address, f"/v1/generations/{id}/events?after={len(told)}", headers={}) as lines:
                told += events(lines)
            assert [num for num, _ in told] == [*range(1, NUM_EVENTS + 1)]
            assert text_of(told) == TEXT
            with opened(address, f"/v1/generations/{id}/events", headers={}) as lines:
                assert events(lines) == told
            answer = httpx2.get(f"{address}/v1/generations/{id}", verify=NO_TLS).json()["answer"]
            assert answer["choices"][0]["text"] == TEXT
    with closing(Store.open(url)) as store:
        (usage,) = store.usage()
        # What is killed may lose the counts of its last second; nothing is counted twice.
        assert usage.requests == 3 or (number == signal.SIGKILL and usage.requests < 3)


NAMES = {"type": "array", "minItems": 12, "items": {"type": "string", "minLength": 8, "maxLength": 12}}
CONSTRAINED: Sequence[Mapping[str, Any]] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": NAMES}}},
    {
        "guided_grammar": 'root ::= item{12} "done"\nitem ::= "- " [a-z ]{8,20} " (" [0-9]{3} " EUR)\\n"',
        "temperature": 0.8,
    },
    {"guided_regex": "[a-z]{3,9}(, [a-z]{3,9}){30}", "temperature": 0.8, "logprobs": 1},
)


def killed_under(settings: str, requests: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Check that answers of a model end as they would have, if their server is killed in the middle of them."""
    file = folder / "legato.toml"
    file.write_text(f"[store]\nurl = 'sqlite:///{folder}/legato.db'\n{settings}")
    plain = {"model": "own", "prompt": "A list of names in Fran", "temperature": 0, "seed": 7, "max_tokens": 100}
    asked = [{**plain, "stream": True, "resumable": True, **request} for request in requests]
    found = []
    with serve_process("--config", str(file)) as server, ExitStack() as stack:
        url = server.url.removesuffix("/v1")
        whole = []
        for fields in asked:
            with opened(url, COMPLETIONS, post=fields, headers={}) as lines:
                whole.append([data for _, data in events(lines)])
        streams = [stack.enter_context(opened(url, COMPLETIONS, post=fields, headers={})) for fields in asked]
        found = [events(lines, 12) for lines in streams]
        for told in found:
            assert httpx2.get(f"{url}/v1/generations/{id_of(told)}", verify=NO_TLS).json()["status"] == "running"
        os.kill(server.pid, signal.SIGKILL)
    with serve_process("--config", str(file)) as server:
        url = server.url.removesuffix("/v1")
        for told, expected in zip(found, whole, strict=True):
            with opened(url, f"/v1/generations/{id_of(told)}/events?after={len(told)}", headers={}) as lines:
                told += events(lines)
            assert [choice_of(data) for _, data in told] == [choice_of(data) for data in expected]


def choice_of(data: str) -> Any:
    """What an event says, without the id and the time of its answer."""
    return data if data == "[DONE]" else json.loads(data)["choices"]


@pytest.mark.timeout(180)
def test_an_answer_under_a_constraint_survives_its_server(tmp_path: Path) -> None:
    killed_under(f"[models.own]\npath = '{weights(SMALL)}'\n", CONSTRAINED, tmp_path)


@pytest.mark.timeout(180)
def test_an_answer_of_another_server_survives_the_one_before_it(small: Served, tmp_path: Path) -> None:
    write_tokenizer(weights(SMALL), tmp_path)
    settings = f"[models.own]\nengine = 'upstream'\nurls = ['{small.url}']\ntokenizer = '{tmp_path}'\n"
    killed_under(settings, [{}, {"prompt": "One, two, three, four,", "stop": ["forty"]}], tmp_path)


def test_a_generation_belongs_to_its_key_after_a_death_too(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        secret = store.create_key(Key("ann"))
        ann = {"Authorization": f"Bearer {secret}"}
        with (
            serve_script(words, store=store) as served,
            opened(served.url, COMPLETIONS, post=body(prompt="slow "), headers=ann) as lines,
        ):
            found = events(lines, 5)
        path = f"/v1/generations/{id_of(found)}/events"
        with serve_script(words, store=store) as served, opened(served.url, path, headers=ann) as lines:
            assert text_of(events(lines)) == TEXT
