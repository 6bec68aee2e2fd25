"""What the events of another server's stream say.

It receives an event's data and returns what it adds to an answer. A server that is broken may send anything: what is no
such event is a ValueError, whatever is wrong with it, so that nothing that is returned has to be looked at again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Part", "joined", "message_of", "read_part"]

_ID = "token_id:"
"""How vLLM writes a token in log-probabilities if it is asked for ids."""
_BROKEN_OFF = ("abort", "cancelled", "error")
"""What servers call the end of an answer that has none."""
_LEAST = -9999.0
"""What stands for a log-probability of minus infinity, which is not JSON."""
_MOST = 1.0
"""Above 0 by more than rounding, no number is a log-probability."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer."""

    text: str = ""
    ids: tuple[int, ...] = ()
    """Of its tokens; none: the server does not tell them."""
    logprobs: tuple[float | None, ...] = ()
    """Of its tokens, if they were asked for."""
    tops: tuple[Mapping[str | int, float], ...] = ()
    """The likeliest tokens in the place of each, by text, or by id where the server tells ids."""
    reason: str | None = None
    """Why the answer ends, in its last part."""


def read_part(event: bytes, num_ids: int) -> Part:
    """Read an event.

    Args:
        event: its data.
        num_ids: the size of the model's vocabulary.

    Raises:
        ValueError: it is no part of an answer, or an error that the server reports.
    """
    try:
        value = _DECODER.decode(event.decode())
    except RecursionError:
        raise ValueError("an event is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"an event is not JSON: {error}") from None
    _expect(isinstance(value, dict), "an event", "an object", value)
    if value.get("error"):
        raise ValueError(message_of(value))
    choices = value.get("choices")
    _expect(isinstance(choices, list), "`choices`", "a list", choices)
    if not choices:
        return Part()
    choice = choices[0]
    _expect(isinstance(choice, dict), "a choice", "an object", choice)
    text, reason, scores = choice.get("text"), choice.get("finish_reason"), choice.get("logprobs")
    _expect(text is None or isinstance(text, str), "`text`", "a text", text)
    _expect(reason is None or isinstance(reason, str), "`finish_reason`", "a text", reason)
    _expect(reason not in _BROKEN_OFF, "`finish_reason`", "an end of the answer", reason)
    _expect(scores is None or isinstance(scores, dict), "`logprobs`", "an object", scores)
    scores = scores or {}
    return Part(
        _whole(text or ""),
        tuple(_id(item, num_ids) for item in _items(choice, "token_ids")),
        tuple(None if item is None else _logprob(item) for item in _items(scores, "token_logprobs")),
        tuple(_top(item, num_ids) for item in _items(scores, "top_logprobs")),
        reason,
    )


def joined(parts: Sequence[Part]) -> Part:
    """Return the whole of which these are the parts."""
    return Part(
        "".join(part.text for part in parts),
        tuple(id for part in parts for id in part.ids),
        tuple(logprob for part in parts for logprob in part.logprobs),
        tuple(top for part in parts for top in part.tops),
        next((part.reason for part in reversed(parts) if part.reason), None),
    )


def message_of(body: Any) -> str:
    """Return what an error says, in whatever form a server writes it."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:200]


def _items(values: Mapping[str, Any], name: str) -> Sequence[Any]:
    items = values.get(name)
    _expect(items is None or isinstance(items, list), f"`{name}`", "a list", items)
    return items or ()


def _id(value: Any, num_ids: int) -> int:
    if type(value) is not int or not 0 <= value < num_ids:
        _expect(False, "a token id", f"a number from 0 to {num_ids - 1}", value)
    return int(value)


def _logprob(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    _expect(number <= _MOST, "a log-probability", "a number that is not above 0", value)
    return max(number, _LEAST)


def _top(value: Any, num_ids: int) -> Mapping[str | int, float]:
    _expect(value is None or isinstance(value, dict), "`top_logprobs`", "a list of objects", value)
    return {_token(name, num_ids): _logprob(number) for name, number in (value or {}).items()}


def _token(name: str, num_ids: int) -> str | int:
    """Return the id that a name tells, or the text that it is."""
    if not name.startswith(_ID):
        return _whole(name)
    digits = name.removeprefix(_ID)
    _expect(digits.isascii() and digits.isdigit() and len(digits) < 20, "a token id", "a number", digits)
    return _id(int(digits), num_ids)


def _whole(text: str) -> str:
    """See that a text can be written: JSON can spell half of a surrogate pair."""
    text.encode()
    return text


def _constant(name: str) -> float:
    if name != "-Infinity":
        raise ValueError(f"{name} is no number")
    return -math.inf


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _expect(is_so: bool, name: str, expected: str, value: Any) -> None:
    if not is_so:
        raise ValueError(f"{name} must be {expected}, got {str(value)[:40]!r}")
