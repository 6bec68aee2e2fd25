"""JSON bodies and server-sent events, as bytes.

It receives the bytes of a body and returns a dict, or values and returns the bytes of a frame, or the bytes of a
stream and returns its events. It knows no field's meaning and no sockets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from legato.errors import MalformedBody

__all__ = [
    "DONE",
    "EVENTS",
    "KEEP_ALIVE",
    "LINES",
    "MAX_EVENT_BYTES",
    "EventReader",
    "encode_event",
    "encode_json",
    "encode_line",
    "parse_body",
]

MAX_DEPTH = 64
MAX_EVENT_BYTES = 2**26
"""Of an event that is read: more than any body that is taken can become."""
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
KEEP_ALIVE = {EVENTS: b": keep-alive\n\n", LINES: b" "}
"""What may be sent at any time: a comment; a blank before the next line's JSON."""
DONE = b"data: [DONE]\n\n"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LINE_BREAKS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\u0085": "\\u0085"})
"""Characters that some clients take for the end of a line; inside JSON they may be written as escapes."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_body(data: bytes) -> dict[str, Any]:
    """Read a body as one JSON object.

    Raises:
        MalformedBody: it is empty, not UTF-8, not JSON, no object, nested deeper than 64, has a key twice, a number
        that is not
            finite, or half of a surrogate pair.
    """
    if not data:
        raise MalformedBody("the body is empty; it must be a JSON object")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the body is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise MalformedBody(f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise MalformedBody(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise MalformedBody(f"the body has a number that is too long: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody(f"the body must be a JSON object, got {type(value).__name__}")
    _check(value)
    return value


def encode_json(value: Any) -> bytes:
    """Write a value as compact UTF-8 JSON, safe for clients that split lines at more than newlines."""
    return _ENCODER.encode(value).translate(_LINE_BREAKS).encode()


def encode_event(value: Any) -> bytes:
    """Write a value as one server-sent event: one `data:` line and a blank line."""
    return b"data: " + encode_json(value) + b"\n\n"


def encode_line(value: Any) -> bytes:
    """Write a value as one line."""
    return encode_json(value) + b"\n"


class EventReader:
    """Takes the server-sent events out of a stream, however it is cut.

    Lines end at LF or CR LF alone: U+2028 and its like, which JSON may have as they are, are text. An event that no
    blank line has ended is not there yet.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES, *, is_strict: bool = False) -> None:
        self._max_bytes = max_bytes
        self._is_strict = is_strict
        self._line: list[bytes] = []
        """The parts of the line that has not ended."""
        self._data: list[bytes] = []
        self._num_bytes = 0
        """Read since the last blank line."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes; comments and other fields are skipped.

        Raises:
            ValueError: an event does not end within `max_bytes`; or, if it is strict, a line is none of an event.
        """
        first, *rest = data.split(b"\n")
        self._line.append(first)
        self._num_bytes += len(data)
        events = []
        for part in rest:
            line = b"".join(self._line).removesuffix(b"\r")
            self._line = [part]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                self._num_bytes = len(part)
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif self._is_strict and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise ValueError(f"a line is none of an event: {line[:40]!r}")
        if self._num_bytes > self._max_bytes:
            raise ValueError(f"an event has more than {self._max_bytes} bytes")
        return events


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedBody(f"the body has the key `{key}` twice in one object")
            seen.add(key)
    return value


def _refuse_constant(name: str) -> float:
    raise MalformedBody(f"the body has the number {name}; numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedBody(f"the body has the number {text}; numbers must be finite")
    return value


def _check(value: Mapping[str, Any]) -> None:
    """Refuse depth and lone surrogates, without recursion."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise MalformedBody(f"the body is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            stack += [(key, 0) for key in item]
            stack += [(entry, depth + isinstance(entry, dict | list)) for entry in item.values()]
        elif isinstance(item, list):
            stack += [(entry, depth + isinstance(entry, dict | list)) for entry in item]
        elif isinstance(item, str) and _SURROGATE.search(item):
            raise MalformedBody("the body has half of a surrogate pair, which is no character")
