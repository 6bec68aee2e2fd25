"""What the code knows already stands in the pages as it is in the code: settings, fields, errors, `--help`.

A region of a page between `<!-- NAME -->` and `<!-- end NAME -->` is built here and compared. Words that the code does
not have, such as what a field means, stand in the page alone; a cell of that kind is taken over from the page and must
not be empty. `python -m tests.docs.test_tables` writes all regions anew.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from legato.cli import group
from legato.config import Settings, load_settings
from legato.dialects import llamacpp, ollama
from legato.dialects import openai as dialect
from legato.dialects.openai_requests import CommonBody
from legato.dialects.openai_responses import error_type
from legato.errors import CapacityError, ConfigError, LegatoError
from tests.conftest import DEFAULT, Served, serve_weights
from tests.docs.fields import PATHS, VendorPath, bodies, fate, named
from tests.docs.pages import region

Row = Sequence[str | None]
"""Cells; the first is the row's key, and None is taken over from the page."""

# ---------------------------------------------------------------------------------------------------------------------
# Settings

_KINDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    tuple[str, ...]: "list of texts",
}


def settings() -> Iterator[Row]:
    """A row for every setting: name, kind, default, environment variable, meaning."""
    for option in fields(Settings):
        kind = get_type_hints(Settings)[option.name]
        if is_dataclass(kind):
            yield from _options(kind, option.name, is_in_environment=True)
        elif get_origin(kind) is not None and is_dataclass(item := get_args(kind)[1]):
            yield from _options(item, f"{option.name}.NAME", is_in_environment=False)
        elif get_origin(kind) is not None:
            yield f"`{option.name}.NAME`", _KINDS[get_args(kind)[1]], "none", "–", None
        else:
            yield f"`{option.name}`", _KINDS[kind], None, f"`LEGATO_{option.name.upper()}`", None


def _options(kind: Any, prefix: str, *, is_in_environment: bool) -> Iterator[Row]:
    meanings = _field_docs(kind)
    for option in fields(kind):
        name = f"{prefix}.{option.name}"
        variable = f"`LEGATO_{name.replace('.', '_').upper()}`" if is_in_environment else "–"
        default = None if option.default is MISSING else _default(option.default)
        yield f"`{name}`", _KINDS[get_type_hints(kind)[option.name]], default, variable, meanings.get(option.name)


def _default(value: Any) -> str:
    if value in ("", ()):
        return "empty" if value == "" else "none"
    return f"`{json.dumps(value)}`"


def _field_docs(kind: Any) -> Mapping[str, str]:
    """Return the texts that stand under a dataclass's fields."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for before, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            docs[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def errors() -> Iterator[Row]:
    """A row for every error: class, code, status, OpenAI's type, when."""
    for kind in _subclasses(LegatoError):
        error = kind("", retry_after_s=1) if issubclass(kind, CapacityError) else kind("")
        shown = error_type(error)
        is_answer = not issubclass(kind, ConfigError)
        yield (
            f"`{kind.__name__}`",
            f"`{kind.code}`",
            str(kind.status) if is_answer else "–",
            f"`{shown}`" if is_answer else "–",
            " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()),
        )


def _subclasses(kind: type[LegatoError]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        if below.__module__ == "legato.errors":
            yield below
            yield from _subclasses(below)


# ---------------------------------------------------------------------------------------------------------------------
# Fields of request bodies


def body_fields(body: type[BaseModel], without: type[BaseModel] | None = None) -> Callable[[], Iterator[Row]]:
    """Rows for a body's fields and those of the objects in it: name, what is allowed, default, meaning."""

    def rows() -> Iterator[Row]:
        schema = body.model_json_schema()
        known = without.model_fields if without else {}
        yield from _fields(schema, schema.get("$defs", {}), "", known)

    return rows


def _fields(schema: Mapping[str, Any], defs: Mapping[str, Any], at: str, known: Mapping[str, Any]) -> Iterator[Row]:
    required = schema.get("required", [])
    for name, value in schema["properties"].items():
        if name in known:
            continue
        default = value.get("default")
        shown = "required" if name in required else "–" if default is None else f"`{json.dumps(default)}`"
        yield f"`{at}{name}`", _allowed(value), shown, None
        if "description" not in value:
            for inner, step in _objects(value, name):
                yield from _fields(defs[inner], defs, f"{at}{step}.", {})


def _objects(value: Mapping[str, Any], step: str) -> Iterator[tuple[str, str]]:
    """Find the objects that a value may have, each with the path to it."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2], step
    for option in value.get("anyOf", ()):
        yield from _objects(option, step)
    if "items" in value:
        yield from _objects(value["items"], f"{step}[i]")


def _allowed(value: Mapping[str, Any]) -> str:
    if "description" in value:
        return str(value["description"])
    if "anyOf" in value:
        return " or ".join(_allowed(option) for option in value["anyOf"] if option.get("type") != "null")
    if "enum" in value:
        return ", ".join(f"`{json.dumps(option)}`" for option in value["enum"])
    match value.get("type"):
        case "string":
            return "a text, not empty" if value.get("minLength") else "a text"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return ("a whole number" if kind == "integer" else "a number") + _bounds(value, kind == "integer")
        case "array":
            return f"a list, each {_allowed(value['items'])}"
        case _:
            items = value.get("additionalProperties")
            return f"an object, each value {_allowed(items)}" if isinstance(items, Mapping) else "an object"


def _bounds(value: Mapping[str, Any], is_whole: bool) -> str:
    low, high = value.get("minimum"), value.get("maximum")
    if is_whole and "exclusiveMaximum" in value:
        high = value["exclusiveMaximum"] - 1
    if "exclusiveMinimum" in value:
        return f" > {value['exclusiveMinimum']} and <= {high}"
    return f", {low} to {high}" if high is not None else f", at least {low}" if low is not None else ""


def documented(path: VendorPath) -> Callable[[], Iterator[Row]]:
    """Rows for the fields that a vendor documents: name, what becomes of it here, what is allowed, meaning."""

    def rows() -> Iterator[Row]:
        allowed = {row[0]: row[1] for row in body_fields(path.dialect.body)()}
        for name, body in bodies(path):
            yield f"`{name}`", fate(path, name, body), allowed.get(f"`{name}`", "–"), None

    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Regions

TABLES: Mapping[str, tuple[Sequence[str], Callable[[], Iterator[Row]]]] = {
    "settings": (("setting", "kind", "default", "environment variable", "meaning"), settings),
    "errors": (("error", "code", "status", "`type`", "when"), errors),
    "fields of both": (("field", "allowed", "default", "meaning"), body_fields(CommonBody)),
    "fields of completions": (
        ("field", "allowed", "default", "meaning"),
        body_fields(dialect._CompletionsBody, CommonBody),
    ),
    "fields of chat": (("field", "allowed", "default", "meaning"), body_fields(dialect._ChatBody, CommonBody)),
    "fields of llama.cpp": (("field", "allowed", "default", "meaning"), body_fields(llamacpp._GenerationBody)),
    "fields of completion": (
        ("field", "allowed", "default", "meaning"),
        body_fields(llamacpp._CompletionBody, llamacpp._GenerationBody),
    ),
    "fields of infill": (
        ("field", "allowed", "default", "meaning"),
        body_fields(llamacpp._InfillBody, llamacpp._GenerationBody),
    ),
    "fields of ollama": (("field", "allowed", "default", "meaning"), body_fields(ollama._GenerateBody)),
    **{name: (("field", "here", "allowed", "meaning"), documented(path)) for name, path in PATHS.items()},
}


def commands() -> list[str]:
    """The names of all commands, those below others too."""
    names = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        names += [name, *(f"{name} {below}" for below in getattr(command, "commands", ()))]
    return sorted(names)


def help_text(command: str) -> str:
    """Return a fenced block with what `--help` prints."""
    result = CliRunner().invoke(group, [*command.split(), "--help"], prog_name="legato", terminal_width=80)
    assert result.exit_code == 0, result.output
    return f"```text\n{result.output.rstrip()}\n```"


def build_table(name: str) -> str:
    """Return a table as it should be, with what only the page has taken over from there."""
    header, rows = TABLES[name]
    _, match = region(name)
    old = {cells[0]: cells for cells in map(_cells, match[1].splitlines()) if len(cells) == len(header)}
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows():
        kept = old.get(str(row[0]), [""] * len(header))
        lines.append(_line([kept[at] if cell is None else cell.replace("|", "\\|") for at, cell in enumerate(row)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# ---------------------------------------------------------------------------------------------------------------------
# Tests


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_says(name: str) -> None:
    page, match = region(name)
    expected = build_table(name)
    assert match[1] == expected, f"{page.name} has drifted: run `python -m tests.docs.test_tables`"
    empty = [line for line in expected.splitlines() if "" in _cells(line)]
    assert not empty, "the page must say what the code does not"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    """A server that has all that a vendor's field may ask for: infill tokens, and tags to think between."""
    with serve_weights(DEFAULT, context_length=1024, reasoning_open="<think>", reasoning_close="</think>") as served:
        yield served


@pytest.mark.parametrize("name", PATHS)
def test_what_becomes_of_a_field_is_what_the_server_does(thinking: Served, name: str) -> None:
    path = PATHS[name]
    for field, body in bodies(path):
        response = thinking.post(path.path, {**body, "model": DEFAULT})
        ignored = response.headers.get("legato-ignored", "").split(", ")
        shown = named(field, ignored) if response.status_code == 200 else "refused"
        assert shown == fate(path, field, body), f"{field}: {response.text}"


@pytest.mark.parametrize("command", ["", *commands()])
def test_the_help_of_a_command_is_what_it_prints(command: str) -> None:
    page, match = region(f"help {command}".strip())
    assert match[1].split() == help_text(command).split(), f"{page.name}: run `python -m tests.docs.test_tables`"


def test_the_environment_variables_of_the_table_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"whole number": "5", "number": "5.5", "true or false": "true", "text": "x.test", "path": "folder"}
    special = {
        "`server.api_keys`": "sha256:" + 64 * "0",
        "`server.cors_origins`": "http://a.test, app://b",
        "`server.log_format`": "json",
    }
    expected = {}
    for name, kind, _, variable, _ in settings():
        if variable != "–":
            text = special.get(str(name)) or values.get(str(kind), "one, two")
            monkeypatch.setenv(str(variable).strip("`"), text)
            expected[str(name).strip("`")] = text
    read = load_settings(None, flags={}, default_model="m")
    for name, text in expected.items():
        group_name, _, option = name.rpartition(".")
        value = getattr(getattr(read, group_name) if group_name else read, option)
        shown = ", ".join(value) if isinstance(value, tuple) else str(value)
        assert shown.lower() == text, name


def write() -> None:
    """Write every region anew."""
    texts = {name: build_table(name) for name in TABLES}
    texts |= {f"help {command}".strip(): help_text(command) for command in ["", *commands()]}
    for name, text in texts.items():
        page, match = region(name)
        page.write_text(f"{match.string[: match.start(1)]}{text}{match.string[match.end(1) :]}", "utf-8")


if __name__ == "__main__":
    write()
