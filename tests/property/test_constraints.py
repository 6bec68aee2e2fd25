"""Whatever schema is sent, it compiles or is refused with a reason; what a matcher takes does not depend on cuts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from legato.decoding.grammar import Compiler, grammar
from legato.decoding.grammar_check import Checker
from legato.engines.llamacpp.binding import Vocabulary
from legato.errors import InvalidField
from legato.types import ConstraintOptions

NAMES = st.sampled_from(["a", "name", "Größe", "x y", ""]) | st.text(max_size=4)
COUNTS = st.integers(-1, 40)
SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text(max_size=5)
PATTERNS = st.sampled_from(["^[a-z]+$", "a|b", "(", "(?=x)", "\\d{3}", "[^\\x00]", "(a*)*$", "^$", "\\bx", "."])
TYPES = ["string", "integer", "number", "boolean", "null", "object", "array", "any"]
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), max_size=3),
        "enum": st.lists(SCALARS, max_size=4),
        "const": SCALARS,
        "minLength": COUNTS,
        "maxLength": COUNTS,
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "email", "uuid", "ipv4", "nonsense"]),
        "minimum": COUNTS,
        "exclusiveMaximum": st.floats(-5, 50),
        "multipleOf": st.sampled_from([0, 1, 5, 0.1, -2]),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/nowhere", "http://x.test/y"]),
        "title": st.text(max_size=4),
        "default": SCALARS,
    },
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that are made of others."""
    some = st.lists(inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(TYPES),
            "properties": st.dictionaries(NAMES, inner, max_size=4),
            "required": st.lists(NAMES, max_size=2),
            "additionalProperties": inner | st.booleans(),
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
            "items": inner | st.booleans(),
            "prefixItems": some,
            "minItems": COUNTS,
            "maxItems": COUNTS,
            "anyOf": some,
            "oneOf": some,
            "allOf": some,
            "not": inner,
            "uniqueItems": st.booleans(),
            "$defs": st.fixed_dictionaries({"a": inner}),
        },
    )


SCHEMAS = st.recursive(LEAVES | st.booleans(), nested, max_leaves=6)


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    one = Checker()
    yield one
    one.close()


@given(schema=SCHEMAS)
@settings(deadline=None)
def test_a_schema_compiles_or_is_refused_with_a_reason(checker: Checker, schema: Any) -> None:
    options = ConstraintOptions("json", json.dumps(schema), "guided_json")
    try:
        said = checker.check(options, "")
    except InvalidField as error:
        said = error.message
    is_refused = re.match("`guided_json` (cannot be used: .|is too complex)", said) and "<unknown>" not in said
    assert is_refused or json.loads(said)["grammars"]


@given(value=st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=8))
@settings(max_examples=200, deadline=None)
def test_every_byte_of_json_is_taken_however_it_is_cut(vocabulary: Vocabulary, value: Any) -> None:
    compiler = _compiler(vocabulary)
    text = json.dumps({"value": value}, ensure_ascii=False).replace("\x7f", "")
    any_object = grammar(ConstraintOptions("json", '{"type": "object"}', "f"), "", text, is_after_thinking=False)
    at_once, by_tokens, by_bytes = (compiler.compile(any_object) for _ in range(3))
    data = text.encode()
    assert at_once.take(data) == len(data)
    ids = vocabulary.encode(data, special=False)
    assume(b"".join(vocabulary.pieces[id] for id in ids) == data)  # A vocabulary need not have every byte.
    for id in ids:
        assert by_tokens.allowed()[id]
        assert by_tokens.take(vocabulary.pieces[id]) == len(vocabulary.pieces[id])
    for at in range(len(data)):
        by_bytes.take(data[at : at + 1])
    assert (at_once.is_over, by_tokens.is_over, by_bytes.is_over) == (True, True, True)
    assert (at_once.allowed() == by_tokens.allowed()).all()
    assert set(np.flatnonzero(by_bytes.allowed()).tolist()) == vocabulary.end_ids


_compilers: dict[int, Compiler] = {}


def _compiler(vocabulary: Vocabulary) -> Compiler:
    """Make one for each vocabulary."""
    if id(vocabulary) not in _compilers:
        _compilers[id(vocabulary)] = Compiler(vocabulary.pieces, vocabulary.control_ids, vocabulary.end_ids)
    return _compilers[id(vocabulary)]
