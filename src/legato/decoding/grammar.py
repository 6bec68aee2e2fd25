"""What a text may be, and what can follow of it: JSON, schemas, patterns, choices and grammars, by llguidance.

It receives constraints as they were asked (`ConstraintOptions`), tokenizers' bytes and texts' bytes; it returns
grammars (`grammar`) and matchers (`Compiler`), which say which tokens can follow. It knows no model and no engine.

A matcher is fed with bytes, never with a text's tokens: how a prefix is cut into tokens does not matter to it. Run as
`python -m legato.decoding.grammar`, this module is the process in which `checker.Checker` tries what callers send.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from legato.types import ConstraintOptions

__all__ = ["Compiler", "ConstraintError", "Matcher", "TooComplex", "grammar"]

Mask = NDArray[np.bool_]

_SPACE = " \t\r\n"
_MAX_SPACE = 16
"""White space that may stand in one place of JSON, unless the prefix itself has more."""
_MAX_DIGITS = 32
"""After so many digits in a row no more are written, if anything else can stand there."""
_LIMITS = LLParserLimits(step_max_items=20_000, max_items_in_row=1_300, max_lexer_states=50_000, verbose_errors=False)
"""A row has four items for each optional property that may come next. An ambiguous grammar takes time with its square:
with so many, 70 ms for a byte.
"""
_MAX_COMPILED = 32
_MAX_MEMORY = 2**31
_SHOWN = 40
_MAX_REASON = 400
_MAX_FORCED = 16_384
_END = b"<|\0|>"
"""The one control token of the process that tries constraints; no grammar may name one."""
_BYTES = tuple(bytes([byte]) for byte in range(256))


class ConstraintError(Exception):
    """A constraint is wrong, cannot be compiled, or became too complex on the way."""


class TooComplex(ConstraintError):
    """A constraint became too complex on the way."""


# ---------------------------------------------------------------------------------------------------------------------
# Grammars


def grammar(options: ConstraintOptions, lead: str, prefix: str, *, is_after_thinking: bool) -> str:
    """Return a constraint as a grammar for `Compiler`.

    Args:
        options: what was asked.
        lead: what the grammar's text has before the constrained one.
        prefix: the beginning of the constrained text. There, white space and the opening of a code fence may stand
        before JSON; a fence is then closed behind it.
        is_after_thinking: the text comes right behind thinking: there a model may write white space before JSON.

    Raises:
        ConstraintError: it cannot be read.
    """
    body: dict[str, Any] = {"name": "body"}
    start = "@body"
    rules = ""
    match options.kind:
        case "json":
            space = options.whitespace or f"[ \\t\\r\\n]{{1,{_longest_space(prefix)}}}"
            body["json_schema"] = {**_schema(options.text), "x-guidance": _json_options(options, space)}
            rules = f"\nSPACE: /[ \\t\\r\\n]{{1,{_longest_space(prefix)}}}/"
            if prefix.startswith(tuple(_SPACE)) or is_after_thinking:
                start = "SPACE? @body"
            if prefix.lstrip(_SPACE).startswith("`"):
                start = 'SPACE? "```" "json"? /[ \\t]{0,8}\\r?\\n/ SPACE? @body SPACE? "```"'
        case "regex":
            (pattern,) = json.loads(LLMatcher.grammar_from_regex(options.text))["grammars"]
            body["lark_grammar"] = pattern["lark_grammar"]
        case "choice":
            body["lark_grammar"] = "start: " + " | ".join(_literal(choice) for choice in json.loads(options.text))
        case "grammar":
            try:
                body["lark_grammar"] = any_to_lark(options.text)
            except Exception as error:  # noqa: BLE001 - whatever the converter finds wrong
                raise ConstraintError(_first_line(str(error)) or type(error).__name__) from None
    if lead:
        start = f"{_literal(lead)} {start}"
    # Without this, a mask has of forced text only the token that llguidance's own tokenizer would take.
    top = f'%llguidance {{"no_forcing": true}}\nstart: {start}{rules}'
    return json.dumps({"grammars": [{"lark_grammar": top}, body]})


def _schema(text: str) -> Mapping[str, Any]:
    schema = json.loads(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintError("a schema that nothing satisfies" if schema is False else "a schema must be an object")
    if "x-guidance" in schema:
        raise ConstraintError('Unimplemented keys: ["x-guidance"]')
    return schema


def _json_options(options: ConstraintOptions, space: str) -> Mapping[str, Any]:
    rule = {"whitespace_flexible": False} if options.whitespace == "" else {"whitespace_pattern": space}
    return {**rule, "json_allow_general_unicode_escapes": True}


def _longest_space(prefix: str) -> int:
    return max(_MAX_SPACE, *(len(run) for run in re.findall(f"[{_SPACE}]+", prefix)), 0)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


# ---------------------------------------------------------------------------------------------------------------------
# Matchers


class Compiler:
    """Makes matchers for one vocabulary. Building it takes up to half a second; grammars are remembered."""

    def __init__(self, pieces: Sequence[bytes], control_ids: Iterable[int], end_ids: Iterable[int]) -> None:
        """Take the bytes of all tokens, by id, and the ids that are no text, or end one; there must be one of those."""
        self._num_tokens = len(pieces)
        ends = sorted(end_ids)
        # Behind the vocabulary stands a token for every byte, so that any bytes can be fed.
        words = _Words([*pieces, *_BYTES], sorted(control_ids), ends[0], self._num_tokens)
        self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=ends)
        self._digits = np.array([piece[:1].isdigit() for piece in pieces])
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a text.

        Raises:
            ConstraintError: the grammar is wrong, or too complex.
        """
        native = self._compiled.pop(grammar, None) or LLMatcher(self._tokenizer, grammar, limits=_LIMITS, log_level=0)
        if native.is_error():
            raise ConstraintError(_reason(native))
        self._compiled[grammar] = native
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return Matcher(native.deep_copy(), self._num_tokens, self._digits)


class _Words:
    """A vocabulary, as llguidance wants it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int, first_byte: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._first_byte = first_byte

    def __call__(self, data: bytes) -> list[int]:
        return [self._first_byte + byte for byte in data]


class Matcher:
    """A place in a constrained text."""

    def __init__(
        self, native: LLMatcher, num_tokens: int, digits: Mask, *, num_digits: int = 0, forced: bytes | None = None
    ) -> None:
        self._native = native
        self._num_tokens = num_tokens
        self._digits = digits
        self._num_digits = num_digits
        self._forced = forced

    def copy(self) -> Matcher:
        """Return another matcher at the same place. Costs microseconds."""
        native = self._native.deep_copy()
        return Matcher(native, self._num_tokens, self._digits, num_digits=self._num_digits, forced=self._forced)

    def take(self, data: bytes) -> int:
        """Go on behind `data`; return how many of its bytes can stand there, behind which the matcher then is.

        Raises:
            TooComplex: what can follow is too much to find out.
        """
        num = self._native.try_consume_tokens([self._num_tokens + byte for byte in data])
        self._check()
        taken = data[:num]
        if self._forced is not None:
            self._forced = self._forced.removeprefix(taken) if self._forced.startswith(taken) else None
        num_digits = len(taken) - len(taken.rstrip(b"0123456789"))
        self._num_digits = num_digits + (self._num_digits if num_digits == len(taken) else 0)
        return num

    def allowed(self) -> Mask:
        """Say of every token whether it can follow; of those that end a text, whether it can end here.

        Raises:
            TooComplex: what can follow is too much to find out.
        """
        words = np.empty((self._num_tokens + len(_BYTES) + 31) // 32, np.int32)
        self._native.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        allowed = np.unpackbits(words.view(np.uint8), count=self._num_tokens, bitorder="little").view(np.bool_)
        if self._num_digits >= _MAX_DIGITS and (others := allowed & ~self._digits).any():
            return others
        return allowed

    def forced(self) -> bytes:
        """Return the bytes that must follow, whatever else does.

        Raises:
            TooComplex: what can follow is too much to find out.
        """
        if not self._forced:
            self._forced = self._native.compute_ff_bytes()
            self._check()
        return self._forced

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._native.is_accepting()

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        return self._native.is_stopped()

    def _check(self) -> None:
        if self._native.is_error():
            raise TooComplex(_reason(self._native))


def _reason(native: LLMatcher) -> str:
    said = native.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "")
    return " ".join(said.split())[:_MAX_REASON]


# ---------------------------------------------------------------------------------------------------------------------
# The process that tries constraints


def main() -> None:
    """Say that all is ready, then answer questions, a line of JSON each, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    compiler = Compiler([*_BYTES, _END], [256], [256])
    _say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        options = ConstraintOptions(**question.pop("options"))
        try:
            verdict = _try(compiler, options, **question)
        except ConstraintError as error:
            verdict = {"reason": str(error)}
        _say(verdict)


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _try(
    compiler: Compiler, options: ConstraintOptions, *, lead: str, prefix: str, is_after_thinking: bool
) -> Mapping[str, Any]:
    compiled = grammar(options, lead, prefix, is_after_thinking=is_after_thinking)
    matcher = compiler.compile(compiled)
    data = (lead + prefix).encode()
    num = matcher.take(data)
    if num < len(data):
        return {"offset": num - len(lead.encode()), "follows": _follows(matcher)}
    matcher.allowed()
    if len(matcher.forced()) > _MAX_FORCED:
        raise ConstraintError(f"more than {_MAX_FORCED} bytes would be forced")
    return {"grammar": compiled}


def _follows(matcher: Matcher) -> str:
    """Describe what could stand at a place."""
    if forced := matcher.forced():
        return repr(forced[:_SHOWN].decode("utf-8", "replace"))
    allowed = np.flatnonzero(matcher.allowed()[:256]).tolist()
    shown = [repr(part) if len(part) == 1 else f"{part[0]!r} to {part[-1]!r}" for part in _runs(allowed)]
    if not {9, 10, 13, 32}.isdisjoint(allowed):
        shown.append("white space")
    if allowed and allowed[-1] >= 0x80:
        shown.append("letters of other scripts")
    if matcher.is_complete or not shown:
        shown.append("the end")
    return ", ".join(shown)


def _runs(codes: Iterable[int]) -> Iterable[str]:
    """Join the ASCII characters among codes that follow each other."""
    printable = [code for code in codes if 0x20 < code < 0x7F]
    for _, run in groupby(enumerate(printable), lambda item: item[1] - item[0]):
        yield "".join(chr(code) for _, code in run)


if __name__ == "__main__":
    main()
