"""Who may ask, and which pages may read the answer: keys on every path, and headers for other origins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import httpx2
import pytest
from starlette.routing import Router

from legato.config import LimitSettings, ServerSettings
from legato.run.models import Models
from legato.run.run import Report
from legato.server.app import create_app
from legato.server.queries import report_headers
from tests.conformance.reading import CHAT, COMPLETIONS, HI, body_for
from tests.conftest import NO_TLS, Served, empty_store, serve_script

ORIGIN = "https://page.example"
KEY = {"Authorization": "Bearer right"}


def routes() -> list[tuple[str, str]]:
    """Method and path of everything that is served but the documentation, which may be absent."""
    with empty_store() as store:
        app = create_app(Models({}, {}), store, ServerSettings(), LimitSettings())
    assert isinstance(app, Router)
    found = [(route.methods, route.path) for route in app.routes]  # type: ignore[attr-defined]
    return [
        (method, path.replace("{name:path}", "m").replace("{name}", "m").replace("{id}", "m"))
        for methods, path in found
        for method in sorted(methods - {"HEAD"})
        if not path.startswith("/docs")
    ]


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """A server as it is without any settings."""
    with serve_script([b"ok"]) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server with a key, of which it was given the hash, and with pages of another origin that may read answers."""
    key = "sha256:" + hashlib.sha256(b"right").hexdigest()
    settings = ServerSettings(port=0, api_keys=(key, "second"), cors_origins=(ORIGIN, "http://localhost:3000"))
    with serve_script([b"ok"], server=settings) as served:
        yield served


def ask(served: Served, method: str, path: str, headers: Mapping[str, str]) -> httpx2.Response:
    """Make a request without a body."""
    return httpx2.request(method, served.url + path, headers=dict(headers), verify=NO_TLS, timeout=20)


# ---------------------------------------------------------------------------------------------------------------------
# Keys

PUBLIC = ["/health", "/ready", "/openapi.json"]


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_path_that_is_not_public_wants_a_key(locked: Served, method: str, path: str) -> None:
    refused = {400, 401} if path.startswith(("/v2/", "/openai/")) else {401}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        status = ask(locked, method, path, headers).status_code
        assert (status == 200) if path in PUBLIC else (status in refused)
    for token in ("right", "second"):
        answer = ask(locked, method, path, {"Authorization": f"Bearer {token}"})
        is_admins = path.startswith(("/admin/", "/metrics"))
        assert answer.status_code == (403 if is_admins else 404 if "/generations/" in path else 200) or (
            "body is empty" in answer.text
        )


def test_a_hash_is_not_its_key(locked: Served) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    for token in (digest, f"sha256:{digest}"):
        assert ask(locked, "GET", "/v1/models", {"Authorization": f"Bearer {token}"}).status_code == 401


# ---------------------------------------------------------------------------------------------------------------------
# Other origins


def preflight(served: Served, path: str, origin: str) -> httpx2.Response:
    """Ask what a browser asks before a page of another origin may post JSON with a key."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return ask(served, "OPTIONS", path, {"Origin": origin, **asked})


@pytest.mark.parametrize("path", [COMPLETIONS, "/v2/chat/completions", "/api/generate"])
def test_a_page_of_a_configured_origin_may_ask(locked: Served, path: str) -> None:
    answer = preflight(locked, path, ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_page_of_a_configured_origin_may_read(locked: Served, path: str, streamed: bool) -> None:
    body = body_for(locked, path, stream=streamed)
    answer = locked.post(path, body, headers={"Origin": ORIGIN, **KEY})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["vary"] == "Origin"
    report = report_headers(
        Report(seed=1, healed_bytes=(0,), clipped=("max_tokens",), truncated={"files": 1}, ignored=("x",))
    )
    exposed = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed == {*report, "retry-after", "x-request-id"}


@pytest.mark.parametrize(
    ("path", "status", "headers", "body"),
    [
        (COMPLETIONS, 401, {}, {"prompt": "x"}),
        ("/v2/chat/completions", 400, {}, {"messages": HI}),
        (COMPLETIONS, 400, KEY, {"prompt": 5}),
        (COMPLETIONS, 404, KEY, {"model": "other", "prompt": "x"}),
        ("/nothing", 404, KEY, {}),
        ("/health", 405, KEY, {}),
        (COMPLETIONS, 403, {**KEY, "Host": "evil.example"}, {"prompt": "x"}),
    ],
)
def test_a_page_of_a_configured_origin_may_read_errors(
    locked: Served, path: str, status: int, headers: Mapping[str, str], body: Mapping[str, object]
) -> None:
    answer = locked.post(path, body, headers={"Origin": ORIGIN, **headers})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_a_page_of_another_origin_may_not(locked: Served) -> None:
    for origin in ("https://evil.example", "https://page.example.evil", "http://page.example", "null"):
        assert "access-control-allow-origin" not in preflight(locked, COMPLETIONS, origin).headers
        answer = locked.post(COMPLETIONS, body_for(locked, COMPLETIONS), headers={"Origin": origin, **KEY})
        assert "access-control-allow-origin" not in answer.headers


def test_any_origin_where_that_is_configured() -> None:
    with serve_script([b"ok"], server=ServerSettings(port=0, cors_origins=("*",))) as served:
        assert preflight(served, COMPLETIONS, "https://any.example").headers["access-control-allow-origin"] == "*"
        answer = served.post(COMPLETIONS, body_for(served, COMPLETIONS), headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


def test_no_page_of_another_origin_without_the_setting(plain: Served) -> None:
    asked = preflight(plain, COMPLETIONS, ORIGIN)
    answered = plain.post(COMPLETIONS, body_for(plain, COMPLETIONS), headers={"Origin": ORIGIN})
    assert (asked.status_code, answered.status_code) == (405, 200)
    for response in (asked, answered):
        assert [name for name in response.headers if name.startswith("access-control-")] == []
