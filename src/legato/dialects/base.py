"""What a dialect is, and how its bodies are checked.

A dialect receives a body that is already JSON and returns a `CompletionRequest`; it receives events and returns
frames. It knows no engine, model or socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from legato.errors import InvalidField, LegatoError
from legato.prompting.profiles import Profile
from legato.types import Accepted, Answer, Chat, CompletionRequest, Delta, Finished, Tokenizer, Usage

__all__ = [
    "Answerer",
    "Body",
    "Catalogue",
    "Dialect",
    "Encoder",
    "Facts",
    "KnownModel",
    "Reply",
    "read_body",
    "unknown_fields",
]

Facts = Mapping[str, Any]
"""The `legato` block of an answer (DESIGN 9.1); empty if it was not asked for."""


class Encoder(Protocol):
    """Writes one answer. A stream's frames, folded, are the whole answer's body."""

    def start(self) -> Iterator[bytes]:
        """Frames before any event."""

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """Frames for one event."""

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Frames after the last event."""

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """Frames that end a stream which cannot go on."""

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""


class Dialect(Protocol):
    """One wire format on one path."""

    stream_type: str
    """Media type of a stream."""

    @property
    def body(self) -> type[Body]:
        """What a request's body has."""

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request.

        Raises:
            RequestError: a field is wrong or asks for what is not there.
        """

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""


class KnownModel(Protocol):
    """What can be said of a model without its engine."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def profile(self) -> Profile:
        """Facts about it."""

    @property
    def num_places(self) -> int:
        """How many answers it writes at once."""

    def open_turn(self, chat: Chat) -> str:
        """Render a chat as one raw prompt."""


class Catalogue(Protocol):
    """The models that are served."""

    @property
    def names(self) -> Sequence[str]:
        """All names and aliases."""

    @property
    def started(self) -> float:
        """When the server started, in seconds since 1970."""

    def find(self, name: str) -> KnownModel:
        """Return the model of a name, the first one for none.

        Raises:
            ModelNotFound: there is none.
        """


@dataclass(frozen=True, slots=True)
class Reply:
    """The JSON that a question is answered with, and the fields of the question that had no effect."""

    value: Any
    ignored: Sequence[str] = ()


Answerer = Callable[[dict[str, Any], Catalogue], Reply]
"""Answers what needs no engine: one path of a dialect beside those that generate."""


class Body(BaseModel):
    """Base of every request body: no coercion, unknown fields kept so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


_Body = TypeVar("_Body", bound=Body)


def read_body(kind: type[_Body], body: dict[str, Any]) -> _Body:
    """Check a body against its model; an explicit null means "not given".

    Raises:
        InvalidField: the first field that is wrong, with what was given and what is allowed.
    """
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(kind, given, error) from None


def unknown_fields(body: Body) -> tuple[str, ...]:
    """Return the names of fields that the model does not know, in the order given; null means "not given"."""
    return tuple(name for name, value in (body.model_extra or {}).items() if value is not None)


def _invalid(kind: type[Body], given: Mapping[str, Any], error: ValidationError) -> InvalidField:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        path = _path(first["loc"])
        return InvalidField(f"`{path}` is required", param=name)
    places, value = _resolve(given, first["loc"])
    allowed = _description(kind, places) or _ALLOWED.get(first["type"])
    if allowed is not None:
        reason = f"must be {allowed}"
    else:
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return InvalidField(f"`{_path(places)}` {reason[0].lower()}{reason[1:]}, got {_short(value)}", param=name)


_ALLOWED = {"model_type": "an object", "dict_type": "an object", "too_short": "a list that is not empty"}
"""What is allowed, in the words of JSON, where pydantic has those of Python and our classes."""


def _description(kind: type[Body], places: tuple[int | str, ...]) -> str | None:
    """Return what the field at a place describes as allowed; None if it says nothing, or the place is no field."""
    description = None
    bodies: tuple[type[Body], ...] = (kind,)
    for place in places:
        description = None
        if isinstance(place, str):
            field = next((body.model_fields[place] for body in bodies if place in body.model_fields), None)
            if field is None:
                return None
            description = field.description
            bodies = tuple(_bodies(field.annotation))
    return description


def _bodies(annotation: Any) -> Iterator[type[Body]]:
    """Yield the bodies that an annotation is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for argument in get_args(annotation):
        yield from _bodies(argument)


def _resolve(given: Mapping[str, Any], places: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], Any]:
    """Follow an error's place as far as it is in the body: the rest names members of a union."""
    value: Any = given
    steps: list[int | str] = []
    for place in places:
        if isinstance(value, Mapping) and place in value:
            value = value[place]
            steps.append(place)
        elif isinstance(value, list) and isinstance(place, int) and place < len(value):
            value = value[place]
            steps.append(place)
        elif not steps:
            break
    return tuple(steps), value


def _path(places: tuple[int | str, ...]) -> str:
    path = ""
    for place in places:
        path += f"[{place}]" if isinstance(place, int) else f".{place}" if path else str(place)
    return path


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
