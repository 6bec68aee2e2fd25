"""Matchers say which tokens can follow; the checker lets nothing take it longer than its time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from legato.decoding.grammar import Compiler, ConstraintError, Matcher, grammar
from legato.decoding.grammar_check import Checker
from legato.errors import InvalidField
from legato.types import Constraint, ConstraintKind, ConstraintOptions, Job, Prompt, Sampling

BYTES = [bytes([byte]) for byte in range(256)]
COMPILER = Compiler([*BYTES, b"ab", b"b ", b"<|end|>"], [258], [258])


def matcher(kind: ConstraintKind, text: str, *, lead: str = "", prefix: str = "", is_late: bool = False) -> Matcher:
    """A matcher behind a prefix."""
    one = COMPILER.compile(grammar(ConstraintOptions(kind, text, "f"), lead, prefix, is_after_thinking=is_late))
    data = (lead + prefix).encode()
    assert one.take(data) == len(data)
    return one


def following(one: Matcher) -> set[int]:
    return set(np.flatnonzero(one.allowed()).tolist())


def test_a_mask_has_every_token_also_of_forced_text() -> None:
    one = matcher("choice", '["ab cd"]')
    assert following(one) == {97, 256}
    assert one.forced() == b"ab cd"
    one.take(b"a")
    assert one.forced() == b"b cd"
    assert following(one) == {98, 257}


def test_the_end_is_allowed_where_the_whole_is_valid() -> None:
    one = matcher("regex", "a{1,2}")
    assert not one.is_complete
    one.take(b"a")
    assert one.is_complete
    assert not one.is_over
    assert following(one) == {97, 258}
    one.take(b"a")
    assert one.is_over
    assert following(one) == {258}


def test_a_copy_goes_its_own_way() -> None:
    one = matcher("regex", "[ab]c")
    other = one.copy()
    assert other.take(b"ac") == 2
    assert one.take(b"xc") == 0
    assert one.take(b"bcd") == 2


def test_what_a_grammar_begins_with_may_be_told() -> None:
    one = matcher("json", "{}", lead="Er sagt: ", prefix='"x')
    assert one.take(b'"') == 1
    assert one.is_over


def test_white_space_before_json_only_where_it_may_be() -> None:
    assert not following(matcher("json", '{"type": "null"}')) & {32, 10}
    assert following(matcher("json", '{"type": "null"}', prefix=" ")) >= {32, 10}
    assert following(matcher("json", '{"type": "null"}', is_late=True)) >= {32, 10}
    one = matcher("json", '{"type": "null"}', prefix="`")
    assert one.forced() == b"``"


def test_digits_end_unless_only_they_can_stand() -> None:
    one = matcher("json", '{"type": "array"}', prefix="[" + "1" * 32)
    assert not following(one) & set(b"0123456789")
    one = matcher("regex", "[0-9]{40}x", prefix="1" * 39)
    assert following(one) == set(b"0123456789")


def test_a_grammar_that_becomes_too_complex_says_so() -> None:
    one = matcher("regex", "[^a]{0,3000}(a[^b]{0,3000}){3}")

    def write() -> None:
        for _ in range(400):
            one.take(b"ca" * 200)
            one.allowed()

    with pytest.raises(ConstraintError, match="lexer"):
        write()


def test_a_checker_gives_up_in_time_and_goes_on() -> None:
    rules = "\n".join(f'r{at} ::= "x" r{at + 1} | "y" r{at + 1} r{at + 1}' for at in range(5000))
    checker = Checker()
    try:
        assert checker.check(ConstraintOptions("regex", "a", "f"), "")
        start = time.monotonic()
        with pytest.raises(InvalidField, match="within 2 seconds"):
            checker.check(ConstraintOptions("grammar", f'root ::= r0\n{rules}\nr5000 ::= "z"', "f"), "")
        assert time.monotonic() - start < 20
        assert checker.check(ConstraintOptions("regex", "a", "f"), "a")
    finally:
        checker.close()


def test_a_job_keeps_its_constraint_as_json() -> None:
    prompt = Prompt((1,), (), b"", 4, 0, "x")
    for constraint in (None, Constraint("g", 3, "f"), Constraint("g", None, "f")):
        job = Job("a", 0, prompt, 5, Sampling(7, 0.0), constraint=constraint)
        assert Job.from_json(job.to_json()) == job
