"""Everything that a user can meet is named in the pages, and the pages name nothing that is not there."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from starlette.routing import Router

from legato.config import LimitSettings, ServerSettings
from legato.dialects import dashscope, deepseek, llamacpp, maas, mistral, ollama, openai
from legato.dialects.base import Body
from legato.errors import LegatoError
from legato.run.models import Models
from legato.run.run import Report
from legato.server.app import create_app
from legato.server.queries import report_headers
from tests.conftest import empty_store
from tests.docs.pages import DOCS, PAGES, README, ROOT, blocks
from tests.docs.test_tables import Row, body_fields, commands, errors, settings


def read(name: str) -> str:
    """Return a page's text."""
    return (DOCS / name).read_text("utf-8")


def column(rows: Iterable[Row], cell: int = 0) -> list[str]:
    """Return one column."""
    return [str(row[cell]) for row in rows]


def test_every_setting_is_named() -> None:
    text = read("configuration.md")
    assert [name for name in column(settings()) if name not in text] == []


def test_every_error_code_is_named() -> None:
    text = read("errors.md")
    codes = {*column(errors(), 1), f"`{LegatoError.code}`"}
    assert sorted(code for code in codes if code not in text) == []


@pytest.mark.parametrize(
    ("page", "bodies"),
    [
        ("openai", (openai._CompletionsBody, openai._ChatBody)),
        (
            "llamacpp",
            (llamacpp._CompletionBody, llamacpp._InfillBody, llamacpp._TokenizeBody, llamacpp._DetokenizeBody),
        ),
        ("ollama", (ollama._GenerateBody,)),
    ],
)
def test_every_request_field_is_named(page: str, bodies: tuple[type[Body], ...]) -> None:
    text = read(f"dialects/{page}.md")
    names = {name for body in bodies for name in column(body_fields(body)())}
    assert sorted(name for name in names if name not in text) == []


@pytest.mark.parametrize(
    ("page", "bodies"),
    [
        ("maas", (maas._Message,)),
        ("dashscope", (dashscope._CompletionsBody, dashscope._Message, dashscope._ChatBody)),
        ("deepseek", (deepseek._CompletionsBody, deepseek._Message, deepseek._ChatBody)),
        ("mistral", (mistral._InfillBody,)),
    ],
)
def test_every_field_of_a_vendors_own_is_named(page: str, bodies: tuple[type[Body], ...]) -> None:
    text = read(f"dialects/{page}.md")
    assert sorted(name for body in bodies for name in body.__annotations__ if name not in text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_installs_what_its_programs_import(page: Path) -> None:
    """Before the first of them; what comes with Python or with Legato, it need not."""
    text = page.read_text("utf-8")
    packages = packages_distributions()
    missing = []
    for block in blocks(page):
        for name in re.findall(r"^ *(?:from|import) (\w+)", block.text if block.language == "python" else "", re.M):
            if name in sys.stdlib_module_names or name == "legato":
                continue
            before = text[: text.index(block.text)]
            if not any(re.search(rf"pip install [^\n`]*\b{package}\b", before) for package in packages[name]):
                missing.append(name)
    assert missing == []


@pytest.mark.parametrize("command", commands())
def test_every_command_has_a_section(command: str) -> None:
    assert f"\n## legato {command}\n" in read("cli.md")


def test_every_report_header_and_key_is_named() -> None:
    text = read("dialects/openai.md")
    headers = report_headers(
        Report(seed=1, healed_bytes=(0,), clipped=("max_tokens",), truncated={"files": 1}, ignored=("x",))
    )
    assert sorted(name for name in headers if f"`{name.title()}`" not in text) == []


def test_every_client_and_every_example_is_named() -> None:
    text, tests = read("clients.md"), ROOT / "tests" / "conformance"
    packages = json.loads((tests / "clients" / "package.json").read_text("utf-8"))["dependencies"]
    names = {*packages, *(path.name for path in (tests / "examples").iterdir())} - {"ai"}
    assert sorted(name for name in names if f"`{name}`" not in text) == []
    assert [name for name in re.findall(r"`(test_\w+\.py)`", text) if not (tests / name).is_file()] == []


def test_every_route_is_named() -> None:
    with empty_store() as store:
        app = create_app(Models({}, {}), store, ServerSettings(), LimitSettings())
    assert isinstance(app, Router)
    paths = [getattr(route, "path", "") for route in app.routes]
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert [path for path in paths if path.replace("{name:path}", "NAME") not in text] == []


def test_every_module_is_named() -> None:
    text = read("architecture.md")
    sources = ROOT / "src" / "legato"
    files = {*sources.rglob("*.py")} - {
        *sources.glob("storage/migrations/versions/*.py")
    }  # One of many, named by a number.
    modules = [path.relative_to(sources).as_posix() for path in files if path.name != "__init__.py"]
    assert sorted(module for module in modules if f"`{module}`" not in text) == []


def test_every_dialect_is_in_its_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (contract,) = [
        contract
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == "Dialects do not import each other"
    ]
    shared = {"__init__", "base", "constraints", "openai_requests", "openai_responses"}
    files = {path.stem for path in (ROOT / "src" / "legato" / "dialects").glob("*.py")} - shared
    assert {f"legato.dialects.{name}" for name in files} == set(contract["modules"])


def test_every_model_is_named() -> None:
    catalog = tomllib.loads((ROOT / "src" / "legato" / "catalog" / "catalog.toml").read_text("utf-8"))
    text = read("engines.md")
    assert [name for name in catalog["models"] if name not in text] == []


def test_every_recipe_is_named() -> None:
    text = read("contributing.md")
    recipes = re.findall(r"^([a-z]+)[ A-Z*]*:", (ROOT / "justfile").read_text("utf-8"), re.M)
    assert "ci" in recipes
    assert [name for name in recipes if name != "default" and f"`just {name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.is_file() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as renderers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_overview_and_the_readme_lead_to_every_page() -> None:
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)]
    overview, readme = read("index.md"), README.read_text("utf-8")
    assert [page for page in pages if page != "index.md" and f"({page})" not in overview] == []
    assert [page for page in pages if f"(docs/{page})" not in readme] == []
