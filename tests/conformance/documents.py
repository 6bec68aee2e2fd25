"""JSON schemas of growing size, and documents that satisfy them, as different writers would lay them out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["document", "schema"]

Schema = Mapping[str, Any]


def _number(rng: random.Random) -> float:
    return round(rng.uniform(-2, 90), rng.randint(0, 4)) or 0.0


_WORDS = ("name", "price_in_euro", "Größe", "is_open", "créé le", "tags", "город", "数量", "emoji 😀", "last-seen")
_STRINGS = ("", "blue", "Grüße", 'a "b"', "naïve\n", "東京", "😀", "x/y", "tab\t")
_KINDS: tuple[tuple[Schema, Callable[[random.Random], Any]], ...] = (
    ({"type": "integer", "minimum": 0, "maximum": 5000}, lambda rng: rng.randint(0, 5000)),
    ({"type": "string", "maxLength": 12}, lambda rng: rng.choice(_STRINGS)),
    ({"type": "boolean"}, lambda rng: rng.random() < 0.5),
    ({"enum": ["red", "green", "dark blue", 7, None]}, lambda rng: rng.choice(["red", "green", "dark blue", 7, None])),
    ({"type": "number", "minimum": -2, "maximum": 90}, _number),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, lambda rng: f"AB-{rng.randint(100, 999)}"),
    ({"type": "string", "format": "date"}, lambda rng: f"20{rng.randint(10, 40)}-0{rng.randint(1, 9)}-17"),
    ({"const": "fixed value"}, lambda rng: "fixed value"),
    ({"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 9, "minimum": 0}]}, lambda rng: rng.choice([None, 4])),
    (
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4},
        lambda rng: [rng.randint(0, 99) for _ in range(rng.randint(1, 4))],
    ),
    ({"$ref": "#/$defs/point"}, lambda rng: {"x": rng.randint(0, 9), "y": rng.choice([True, False])}),
)
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"separators": (",", ":"), "ensure_ascii": False},
    {"ensure_ascii": False},
    {"indent": 2, "ensure_ascii": False},
    {"indent": 4, "ensure_ascii": False},
    {"indent": "\t", "ensure_ascii": False},
)


def schema(size: int) -> Schema:
    """Return a schema of an object with so many properties, all of them required."""
    names = {_name(index): _KINDS[index % len(_KINDS)][0] for index in range(size)}
    return {
        "type": "object",
        "properties": names,
        "required": list(names),
        "additionalProperties": False,
        "$defs": {"point": _POINT},
    }


def document(size: int, rng: random.Random) -> str:
    """Return a document that satisfies `schema(size)`."""
    values = {_name(index): _KINDS[index % len(_KINDS)][1](rng) for index in range(size)}
    return json.dumps(values, **rng.choice(_LAYOUTS))


def _name(index: int) -> str:
    return _WORDS[index] if index < len(_WORDS) else f"{_WORDS[index % len(_WORDS)]} {index // len(_WORDS)}"
