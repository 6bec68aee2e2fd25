"""Which vendor's API is at which path: the dialect that reads a body, and how errors are written.

It receives a path and returns the `Surface` that it belongs to, also for a path without a route. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from legato.dialects import dashscope, deepseek, llamacpp, maas, mistral, ollama, openai
from legato.dialects.base import Dialect
from legato.dialects.openai_responses import OPENAI
from legato.server.middleware import Reply

__all__ = ["DIALECTS", "Surface", "surface_of"]


@dataclass(frozen=True)
class Surface:
    """One vendor's API."""

    encode_error: Reply
    """How it writes errors: also for paths that do not exist, and methods that a path does not take."""
    prefix: str = ""
    """What its paths begin with, ending in a slash. Empty: it has no paths but those named here."""
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    """Its paths that generate, each with its dialect."""
    paths: tuple[str, ...] = ()
    """Further paths that are outside the prefix."""
    takes_x_api_key: bool = False
    """Whether a key may also come as `X-Api-Key`."""

    def has(self, path: str) -> bool:
        """Whether a path is a part of it."""
        return path in self.dialects or path in self.paths or bool(self.prefix and path.startswith(self.prefix))


_OPENAI = Surface(
    OPENAI.encode_error,
    dialects={"/v1/completions": openai.CompletionsDialect(), "/v1/chat/completions": openai.ChatDialect()},
)
_SURFACES = (
    Surface(mistral.SHAPE.encode_error, "/v1/fim/", {"/v1/fim/completions": mistral.InfillDialect()}),
    Surface(maas.SHAPE.encode_error, "/v2/", {"/v2/chat/completions": maas.PrefixChatDialect()}),
    Surface(maas.SHAPE.encode_error, "/openai/", {"/openai/v1/chat/completions": maas.FlaggedChatDialect()}),
    Surface(
        dashscope.SHAPE.encode_error,
        "/compatible-mode/",
        {
            "/compatible-mode/v1/completions": dashscope.CompletionsDialect(),
            "/compatible-mode/v1/chat/completions": dashscope.ChatDialect(),
        },
    ),
    Surface(
        deepseek.SHAPE.encode_error,
        "/beta/",
        {"/beta/completions": deepseek.CompletionsDialect(), "/beta/chat/completions": deepseek.ChatDialect()},
    ),
    Surface(ollama.encode_ollama_error, "/api/", {"/api/generate": ollama.GenerateDialect()}),
    Surface(
        llamacpp.encode_llamacpp_error,
        dialects={"/completion": llamacpp.CompletionDialect(), "/infill": llamacpp.InfillDialect()},
        paths=("/tokenize", "/detokenize", "/apply-template", "/props"),
        takes_x_api_key=True,
    ),
)

DIALECTS: Mapping[str, Dialect] = {
    path: dialect for surface in (_OPENAI, *_SURFACES) for path, dialect in surface.dialects.items()
}
"""The dialect of each path that generates."""


def surface_of(path: str) -> Surface:
    """Return the surface of a path; OpenAI's if no other has it."""
    return next((surface for surface in _SURFACES if surface.has(path)), _OPENAI)
