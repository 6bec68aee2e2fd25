from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from legato.errors import RouteNotFound
from legato.server.site import Site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    (site / "dialects").mkdir(parents=True)
    (site / "index.html").write_text("overview")
    (site / "dialects" / "openai.html").write_text("fields")
    (tmp_path / "secret").write_text("secret")
    return site


async def get(site: Site, name: str | None) -> httpx2.Response:
    """Ask for a path below `/docs/`, or for `/docs` itself."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await site({**scope, "path_params": {} if name is None else {"name": name}}, receive, send)

    path = "/docs" if name is None else f"/docs/{name}"
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://legato") as client:
        return await client.get(path)


def run(site: Site, name: str | None) -> httpx2.Response:

    return asyncio.run(get(site, name))


@pytest.mark.parametrize(("name", "text"), [("", "overview"), ("dialects/openai.html", "fields")])
def test_a_page_is_sent_with_headers_that_let_nothing_else_load(folder: Path, name: str, text: str) -> None:
    response = run(Site(folder), name)
    assert (response.status_code, response.text) == (200, text)
    assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_path_without_its_slash_leads_to_the_overview(folder: Path) -> None:
    response = run(Site(folder), None)
    assert (response.status_code, response.headers["location"]) == (307, "http://legato/docs/")


@pytest.mark.parametrize("name", ["missing.html", "../secret", "dialects/../../secret", "/etc/passwd"])
def test_what_is_no_page_is_not_found(folder: Path, name: str) -> None:
    with pytest.raises(RouteNotFound, match="there is no page at"):
        run(Site(folder), name)


def test_a_site_that_was_not_built_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(RouteNotFound, match="`just docs` builds it"):
        run(Site(tmp_path), "")
