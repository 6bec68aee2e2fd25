"""Keys of the store, what they may do and how much: on every path, and over several servers that share a database."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from legato.config import ModelSettings, ServerSettings, Settings
from legato.engines.scripted import Pause
from legato.prompting.profiles import InfillTokens
from legato.run.models import Models, load_models
from legato.server import access
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.storage.usage import UsageRow
from tests.conformance.reading import COMPLETIONS
from tests.conformance.routes import EVERY, body_on
from tests.conformance.test_cli import alone, failure, output, run
from tests.conftest import DEFAULT, NO_TLS, SMALL, Served, children, serve, serve_process, serve_script

__all__ = ["alone"]

SCRIPT = [b"ok"]


def bearer(key: str) -> dict[str, str]:
    """The header that presents a key."""
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose keys are all in its store, but one."""
    settings = ServerSettings(port=0, api_keys=("configured",))
    with serve_script(SCRIPT, server=settings, infill=InfillTokens(1, 2, 3)) as served:
        yield served


def key_for(served: Served, name: str, **rights: Any) -> dict[str, str]:
    """Make a key; return the header that presents it."""
    return bearer(served.store.create_key(Key(name, **rights)))


def wait_for_usage(store: Store, key: str) -> UsageRow:
    """Return what a key has taken, as soon as it is written and no more follows."""
    rows: list[UsageRow] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.7)
        before, rows = rows, [row for row in store.usage() if row.key == key]
        if rows and rows == before:
            (row,) = rows
            return row
    raise AssertionError(f"no usage of {key}")


# ---------------------------------------------------------------------------------------------------------------------
# Who may ask


def test_a_key_opens_the_paths_until_it_is_revoked(served: Served) -> None:
    header = key_for(served, "ann")
    assert served.get("/v1/models", headers=header).status_code == 200
    served.store.revoke_key("ann")
    time.sleep(access._BELIEVED_S + 0.1)
    refused = served.get("/v1/models", headers=header)
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["error"]["message"]
    assert refused.headers["www-authenticate"] == "Bearer"


def test_a_key_expires_to_the_second(served: Served) -> None:
    header = key_for(served, "brief", expires_at=int(time.time()) + 2)
    assert served.get("/v1/models", headers=header).status_code == 200
    time.sleep(2.1)
    refused = served.get("/v1/models", headers=header)
    assert refused.status_code == 401
    assert "has expired" in refused.json()["error"]["message"]


def test_a_server_is_open_until_it_has_a_key() -> None:
    with serve_script(SCRIPT) as served:
        assert served.get("/v1/models").status_code == 200
        assert served.get("/admin/keys").status_code == 403, "nobody manages keys without one"
        header = key_for(served, "first")
        time.sleep(access._BELIEVED_S + 0.1)
        assert served.get("/v1/models").status_code == 401
        assert served.get("/v1/models", headers=header).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# What it may do


@pytest.mark.parametrize("path", EVERY)
def test_a_model_that_the_key_may_not_use(served: Served, path: str) -> None:
    header = key_for(served, f"elsewhere{EVERY.index(path)}", models=("other",))
    refused = served.post(path, body_on(path), headers=header)
    assert refused.status_code == 403
    assert "may not use the model `m`" in refused.text
    assert served.get("/v1/models", headers=header).json()["data"] == []


def test_a_key_sees_the_models_that_it_may_use(served: Served) -> None:
    header = key_for(served, "here", models=("m", "other"))
    assert [model["id"] for model in served.get("/v1/models", headers=header).json()["data"]] == ["m"]
    assert served.get("/v1/models/m", headers=header).status_code == 200
    assert served.get("/v1/models/nothing", headers=header).status_code == 404


@pytest.mark.parametrize("prompt", ["a<|end|>b", ["fine", "a<|end|>"], [97, 256, 98]])
def test_control_tokens_want_a_right(served: Served, prompt: Any) -> None:
    name = f"plain{len(str(prompt))}"
    header = key_for(served, name, control_tokens=False)
    refused = served.post(COMPLETIONS, {"model": "m", "prompt": prompt}, headers=header)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("not_permitted", "prompt")
    assert "`<|end|>`" in error["message"]
    assert served.post(COMPLETIONS, {"model": "m", "prompt": prompt}, headers=bearer("configured")).status_code == 200
    chat = {"model": "m", "messages": [{"role": "user", "content": "a<|end|>b"}]}
    assert served.post("/v1/chat/completions", chat, headers=header).status_code == 200, "there it is plain text"


# ---------------------------------------------------------------------------------------------------------------------
# How much


def in_a_fresh_minute() -> None:
    """Wait, if this minute is about to end."""
    if (left := 60 - time.time() % 60) < 15:
        time.sleep(left + 0.1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", EVERY)
def test_too_many_requests_are_refused_in_each_dialect(served: Served, path: str) -> None:
    """C... 429 with Retry-After, in the shape of the path."""
    in_a_fresh_minute()
    header = key_for(served, f"often{EVERY.index(path)}", requests_per_minute=1)
    body = body_on(path)
    assert served.post(path, body, headers=header).status_code == 200
    refused = served.post(path, body, headers=header)
    assert refused.status_code == 429
    assert "may make 1 requests per minute" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_a_request_that_is_refused_costs_nothing(served: Served) -> None:
    header = key_for(served, "clumsy", requests_per_minute=1)
    assert served.post(COMPLETIONS, {"model": "m", "prompt": 5}, headers=header).status_code == 400
    assert served.post(COMPLETIONS, {"model": "m", "prompt": "x"}, headers=header).status_code == 200


def test_what_is_not_taken_is_given_back(served: Served) -> None:
    header = key_for(served, "thrifty", tokens_per_month=110)
    body = {"model": "m", "prompt": "ten tokens", "max_tokens": 90}  # Of which the script writes two.
    assert served.post(COMPLETIONS, body, headers=header).status_code == 200
    wait_for_usage(served.store, "thrifty")
    assert served.post(COMPLETIONS, {**body, "max_tokens": 88}, headers=header).status_code == 200
    wait_for_usage(served.store, "thrifty")
    refused = served.post(COMPLETIONS, {**body, "max_tokens": 80}, headers=header)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"


@pytest.mark.timeout(180)
def test_limits_hold_over_servers(served: Served) -> None:
    in_a_fresh_minute()
    header = key_for(served, "everywhere", requests_per_minute=5)
    body = {"model": "m", "prompt": "x"}
    with serve_script(SCRIPT, store=served.store) as other:
        both = [served, other] * 4
        answers = [one.post(COMPLETIONS, body, headers=header).status_code for one in both]
    assert answers == [200] * 5 + [429] * 3


# ---------------------------------------------------------------------------------------------------------------------
# What others have asked


def test_a_key_does_not_learn_from_the_cache_what_another_asked() -> None:
    async def load() -> Models:
        return await load_models(Settings(models={SMALL: ModelSettings()}))

    body = {"model": SMALL, "prompt": "The keeper wrote in the log of the lighthouse. " * 8, "max_tokens": 1}
    with serve(load, ServerSettings(port=0, api_keys=("ann", "bob"))) as served:

        def num_cached(key: str, **fields: Any) -> int:
            answer = served.post(COMPLETIONS, {**body, **fields}, headers=bearer(key)).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [num_cached("ann") > 0 for _ in range(2)] == [False, True]
        assert [num_cached("bob") > 0 for _ in range(2)] == [False, True]
        assert num_cached("ann", cache_salt="x") == 0
        assert num_cached("bob", cache_salt="x") == 0, "a salt is a key's own, too"


# ---------------------------------------------------------------------------------------------------------------------
# Usage


def test_usage_is_counted(served: Served) -> None:
    header = key_for(served, "counted")
    for num in (1, 2):
        body = {"model": "m", "prompt": ["four", "more"], "n": num, "max_tokens": 5}
        assert served.post(COMPLETIONS, body, headers=header).status_code == 200
    row = wait_for_usage(served.store, "counted")
    assert (row.model, row.requests, row.prompt_tokens, row.completion_tokens) == ("m", 2, 16, 12)
    assert row.day == time.strftime("%Y-%m-%d", time.gmtime())


def test_a_stream_that_is_left_is_counted_as_far_as_it_came() -> None:
    script = [part for _ in range(50) for part in (b"x", Pause(0.1))]
    with serve_script(script, server=ServerSettings(port=0)) as served:
        body = {"prompt": "four", "stream": True, "max_tokens": 50}
        with served.client().completions.create(model="m", **body) as stream:  # type: ignore[call-overload]
            for _, _ in zip(range(5), stream, strict=False):
                pass
        row = wait_for_usage(served.store, "")
    assert row.prompt_tokens == 4
    assert 3 <= row.completion_tokens < 30


def test_what_is_counted_is_written_when_the_server_stops(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        with serve_script(SCRIPT, store=store) as served:
            assert served.post(COMPLETIONS, {"model": "m", "prompt": "four"}).status_code == 200
        assert store.usage()[0].prompt_tokens == 4


@pytest.mark.timeout(180)
def test_a_killed_server_loses_at_most_the_last_second(tmp_path: Path) -> None:
    file = tmp_path / "legato.toml"
    url = f"sqlite:///{tmp_path}/legato.db"
    file.write_text(f"[store]\nurl = '{url}'\n")
    with serve_process("--demo", "--config", str(file)) as process:
        stream = process.client().completions.create(model="demo", prompt="four", max_tokens=400, stream=True)
        next(iter(stream))
        time.sleep(1.3)
        os.kill(process.pid, signal.SIGKILL)
        with closing(Store.open(url)) as store:
            (row,) = store.usage()
    assert (row.requests, row.prompt_tokens) == (1, 4)
    assert row.completion_tokens > 0
    assert children(process.pid) == []


# ---------------------------------------------------------------------------------------------------------------------
# Who runs the server


def test_keys_are_managed_over_http(served: Served) -> None:
    admin = key_for(served, "root", admin=True)
    made = served.post("/admin/keys", {"name": "new", "models": ["m"], "requests_per_minute": 7}, headers=admin)
    assert made.status_code == 201
    header = bearer(made.json()["key"])
    assert served.get("/v1/models", headers=header).status_code == 200
    listed = {key["name"]: key for key in served.get("/admin/keys", headers=admin).json()["data"]}
    assert (listed["new"]["models"], listed["new"]["requests_per_minute"]) == (["m"], 7)
    assert made.json()["key"] not in str(listed)
    assert served.post("/admin/keys", {"name": "new"}, headers=admin).status_code == 409
    rotated = served.post("/admin/keys/new/rotate", {}, headers=admin)
    assert served.get("/v1/models", headers=bearer(rotated.json()["key"])).status_code == 200
    revoked = _delete(served, "/admin/keys/new", admin)
    assert revoked == (200, {"name": "new", "revoked": True})
    assert _delete(served, "/admin/keys/nobody", admin)[0] == 404
    for path in ("/admin/keys", "/admin/usage"):
        assert served.get(path, headers=header).status_code in (401, 403)
        assert served.get(path, headers=bearer("configured")).status_code == 403


def _delete(served: Served, path: str, header: Mapping[str, str]) -> tuple[int, Any]:
    answer = httpx2.delete(served.url + path, headers=dict(header), verify=NO_TLS)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": 5}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "x", "requests_per_minute": 0}, "requests_per_minute"),
        ({"name": "x", "tokens_per_minute": "5"}, "tokens_per_minute"),
        ({"name": "x", "models": "m"}, "models"),
        ({"name": "x", "expires_at": 5}, "expires_at"),
        ({"name": "x", "request_per_minute": 5}, "request_per_minute"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(served: Served, body: Mapping[str, Any], param: str) -> None:
    header = key_for(served, f"admin{abs(hash(str(body)))}", admin=True)
    refused = served.post("/admin/keys", body, headers=header)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_usage_over_http(served: Served) -> None:
    admin = key_for(served, "auditor", admin=True)
    served.store.record([UsageRow("2020-01-01", "old", "m", 1, 2, 0, 3)])
    rows = served.get("/admin/usage?until=2020-12-31", headers=admin).json()["data"]
    assert rows == [
        {"day": "2020-01-01", "key": "old", "model": "m", "requests": 1}
        | {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 3}
    ]
    for wrong in ("since=yesterday", "day=2020-01-01"):
        assert served.get(f"/admin/usage?{wrong}", headers=admin).status_code == 400


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def legato(*arguments: str) -> str:
    """Run a command on a database in this folder; return what it prints."""
    served = f"[models.'{DEFAULT}']\n[aliases]\nm = '{DEFAULT}'\n"
    Path("legato.toml").write_text(f"[store]\nurl = 'sqlite:///legato.db'\n{served}")
    return output(*arguments).decode()


def test_a_key_for_a_model_that_is_not_served_is_made_with_a_warning(alone: None) -> None:
    assert legato("keys", "list") == "no keys\n"
    assert json.loads(legato("keys", "list", "--json")) == []
    done = run("keys", "create", "bob", "--model", "nosuch", "--model", "m", "--model", "other")
    assert (done.returncode, done.stdout[:3]) == (0, b"lg-")
    warning = f"no model is served here as nosuch, other, only {DEFAULT}, m; the key is made all the same"
    assert done.stderr.decode() == f"legato: {warning}\n"
    assert ", models nosuch, m, other" in legato("keys", "list")


def test_keys_on_the_command_line(alone: None) -> None:
    rights: Sequence[str] = ("--model", "m", "--tokens-per-month", "500", "--no-control-tokens", "--expires", "90d")
    key = legato("keys", "create", "ann", *rights).strip()
    rotated = legato("keys", "rotate", "ann").strip()
    assert key != rotated
    legato("keys", "create", "root", "--admin")
    legato("keys", "revoke", "root")
    listed = legato("keys", "list")
    assert f"ann\n  {rotated[:11]}..., created 20" in listed
    assert "models m, 500 tokens per month, no control tokens" in listed
    assert ", revoked, admin" in listed
    assert rotated not in listed
    assert [entry["name"] for entry in json.loads(legato("keys", "list", "--json"))] == ["ann", "root"]
    assert failure("keys", "revoke", "nobody") == "there is no key `nobody`"
    assert failure("keys", "create", "ann") == "there is a key `ann` already, or there was one"
    with closing(Store.open("sqlite:///legato.db")) as store:
        (ann, _) = store.keys()
    assert ann.expires_at is not None
    assert abs(ann.expires_at - time.time() - 90 * 86400) < 100


def test_usage_on_the_command_line(alone: None) -> None:
    with closing(Store.open("sqlite:///legato.db")) as store:
        store.record([UsageRow("2026-11-29", "ann", "m", 1, 20, 3, 4), UsageRow("2026-11-30", "", "m", 10, 2, 0, 4)])
    assert legato("usage") == (
        "day         key  model  requests  prompt tokens  cached tokens  completion tokens\n"
        "2026-11-29  ann  m             1             20              3                  4\n"
        "2026-11-30  -    m            10              2              0                  4\n"
    )
    rows = [*csv.DictReader(io.StringIO(legato("usage", "--format", "csv")))]
    assert [(row["key"], row["prompt_tokens"]) for row in rows] == [("ann", "20"), ("", "2")]
    assert [row["day"] for row in json.loads(legato("usage", "--format", "json", "--since", "2026-11-30"))] == [
        "2026-11-30"
    ]
    assert json.loads(legato("usage", "--format", "json", "--key", "nobody")) == []
