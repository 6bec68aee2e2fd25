"""How constraints are asked for: `response_format`, vLLM's fields, and what llama.cpp's and Ollama's share with them.

It receives fields that are checked already and returns `ConstraintOptions`. Whether a schema or a grammar is right, and
fits what is continued, is seen later (`checker`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from legato.dialects.base import Body
from legato.errors import InvalidField, UnsupportedFeature
from legato.types import ConstraintKind, ConstraintOptions

__all__ = [
    "SCHEMA",
    "Choices",
    "ResponseFormat",
    "StructuredOutputs",
    "constraints",
    "json_constraint",
    "only_constraint",
    "text_constraint",
]

MAX_CONSTRAINT_BYTES = 256 * 1024
SCHEMA = "a JSON schema: an object, true or false, or one of them as a text"

Choices = Annotated[
    list[str] | None, Field(min_length=1, max_length=4096, description="a list of texts, at least one and at most 4096")
]


def json_constraint(
    schema: str | Mapping[str, Any] | bool, field: str, whitespace: str | None = None
) -> ConstraintOptions:
    """Return the constraint to JSON of a schema, which may be given as JSON text.

    Raises:
        InvalidField: it is no schema, or too large.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidField(
                f"`{field}` must be {SCHEMA}, got a text that is no JSON: {error}", param=field
            ) from None
        if not isinstance(schema, dict | bool):
            raise InvalidField(f"`{field}` must be {SCHEMA}, got {schema!r:.80}", param=field)
    return _sized(ConstraintOptions("json", json.dumps(schema), field, whitespace=whitespace))


def text_constraint(kind: ConstraintKind, text: str, field: str) -> ConstraintOptions:
    """Return the constraint to a pattern or a grammar.

    Raises:
        InvalidField: it is empty, or too large.
    """
    if not text:
        raise InvalidField(f"`{field}` must not be empty", param=field)
    return _sized(ConstraintOptions(kind, text, field))


def _sized(constraint: ConstraintOptions) -> ConstraintOptions:
    size = len(constraint.text.encode())
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidField(
            f"`{constraint.field}` must have at most {MAX_CONSTRAINT_BYTES} bytes, got {size}", param=constraint.field
        )
    return constraint


def constraints(given: Mapping[str, Any], names: str, whitespace: str | None) -> Iterator[ConstraintOptions]:
    """Yield a constraint for each of vLLM's kinds that is given; `names` makes a field's name of the kind."""
    for kind, value in given.items():
        field = names.format(kind)
        match kind:
            case _ if value is None:
                continue
            case "json":
                yield json_constraint(value, field, whitespace)
            case "choice":
                yield _sized(ConstraintOptions("choice", json.dumps(value, ensure_ascii=False), field))
            case "regex" | "grammar":
                yield text_constraint(kind, value, field)


def only_constraint(given: Iterable[ConstraintOptions]) -> ConstraintOptions | None:
    """Return the one constraint, if there is one.

    Raises:
        InvalidField: there are more.
    """
    first, *others = [*given, None]
    if first is not None and others[0] is not None:
        raise InvalidField(
            f"only one kind of constraint can be used, got `{first.field}` and `{others[0].field}`",
            param=others[0].field,
        )
    return first


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema", description="a JSON schema")]


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema", description="a JSON schema")] = None

    def constraints(self) -> Iterator[ConstraintOptions]:
        """Yield what it asks for, if that is anything."""
        field = "response_format"
        if self.type == "json_object":
            yield json_constraint({"type": "object"} if self.schema_ is None else self.schema_, field)
        if self.type == "json_schema":
            schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
            if schema is None:
                raise InvalidField('`response_format.json_schema` is required with `type` "json_schema"', param=field)
            yield json_constraint(schema, field)


class StructuredOutputs(Body):
    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json", description=SCHEMA)] = None
    regex: str | None = None
    choice: Choices = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def constraint(self) -> ConstraintOptions:
        """Return the one thing that it asks for."""
        field = "structured_outputs"
        for name in ("structural_tag", "disable_additional_properties"):
            if getattr(self, name):
                raise UnsupportedFeature(
                    f"`{field}.{name}` is not supported, got {getattr(self, name)!r:.80}", param=field
                )
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        schema = {"type": "object"} if self.json_object and self.json_ is None else self.json_
        given = {"json": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = only_constraint(constraints(given, f"{field}.{{}}", whitespace))
        if found is None:
            raise InvalidField(f"`{field}` must have one of json, regex, choice, grammar and json_object", param=field)
        return found
