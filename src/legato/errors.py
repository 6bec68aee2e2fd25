"""Every failure Legato can report, as one tree.

LegatoError
├─ RequestError 400        the caller can fix it
│   ├─ MalformedBody 400, UnsupportedMediaType 415, BodyTooLarge 413, BodyTimeout 408
│   ├─ InvalidField 400, UnsupportedFeature 400, PromptTooLong 400
│   ├─ NotAuthenticated 401, HostNotAllowed 403, NotPermitted 403, ModelNotPermitted 403
│   │  └─ KeyMissing 401
│   └─ ModelNotFound 404, RouteNotFound 404, GenerationNotFound 404, KeyNotFound 404,
│      MethodNotAllowed 405, GenerationRunning 409, KeyExists 409
├─ CapacityError           try again later
│   └─ RateLimited 429, BudgetSpent 429, Overloaded 503, StoreUnavailable 503, JournalFull 503
├─ EngineError 500         ours or the engine's fault
│   └─ GenerationFailed 500, EngineUnavailable 503
└─ ConfigError             start-up only; the command line exits with 2

A class knows its status; only a dialect turns an error into a body. Nothing here knows HTTP bodies or sockets.
"""

from __future__ import annotations

__all__ = [
    "BodyTimeout",
    "BodyTooLarge",
    "BudgetSpent",
    "CapacityError",
    "ConfigError",
    "EngineError",
    "EngineUnavailable",
    "GenerationFailed",
    "GenerationNotFound",
    "GenerationRunning",
    "HostNotAllowed",
    "InvalidField",
    "JournalFull",
    "KeyExists",
    "KeyMissing",
    "KeyNotFound",
    "LegatoError",
    "MalformedBody",
    "MethodNotAllowed",
    "ModelNotFound",
    "ModelNotPermitted",
    "NotAuthenticated",
    "NotPermitted",
    "Overloaded",
    "PromptTooLong",
    "RateLimited",
    "RequestError",
    "RouteNotFound",
    "StoreUnavailable",
    "UnsupportedFeature",
    "UnsupportedMediaType",
]


class LegatoError(Exception):
    """The root. `code` is stable and machine-readable; `param` names the field at fault, if there is one."""

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None
    """When it may be worth to try again."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class RequestError(LegatoError):
    """The caller can fix it."""

    status = 400
    code = "invalid_request"


class MalformedBody(RequestError):
    """The body is not one JSON object that we can read."""

    code = "malformed_body"


class UnsupportedMediaType(RequestError):
    """The body is declared as something other than JSON, or as compressed."""

    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(RequestError):
    """The body is over the configured limit."""

    status = 413
    code = "body_too_large"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"


class InvalidField(RequestError):
    """A field has a value that is not allowed."""

    code = "invalid_value"


class UnsupportedFeature(RequestError):
    """A field asks for something that this model, engine or version does not do."""

    code = "unsupported"


class PromptTooLong(RequestError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, num_tokens: int = 0, context_length: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.context_length = context_length


class NotAuthenticated(RequestError):
    """The key is wrong, revoked or expired."""

    status = 401
    code = "invalid_api_key"


class KeyMissing(NotAuthenticated):
    """No key was given."""


class HostNotAllowed(RequestError):
    """The Host header names a host that this server does not answer for."""

    status = 403
    code = "host_not_allowed"


class NotPermitted(RequestError):
    """The key may not do this."""

    status = 403
    code = "not_permitted"


class ModelNotPermitted(RequestError):
    """The key may not use this model."""

    status = 403
    code = "model_not_permitted"


class ModelNotFound(RequestError):
    """No served model or alias has this name."""

    status = 404
    code = "model_not_found"


class RouteNotFound(RequestError):
    """No such path."""

    status = 404
    code = "not_found"


class KeyNotFound(RequestError):
    """No key in the store has this name."""

    status = 404
    code = "key_not_found"


class GenerationNotFound(RequestError):
    """The key has no resumable generation of this id."""

    status = 404
    code = "generation_not_found"


class GenerationRunning(RequestError):
    """The generation is not done, so nothing can go on behind it."""

    status = 409
    code = "generation_not_done"


class KeyExists(RequestError):
    """Another key in the store has this name, or had it."""

    status = 409
    code = "key_exists"


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


class CapacityError(LegatoError):
    """Try again after `retry_after_s` seconds."""

    status = 503
    code = "overloaded"
    retry_after_s: int

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(CapacityError):
    """Too many requests are waiting already, or the key has made too many in this minute."""

    status = 429
    code = "rate_limit_exceeded"


class BudgetSpent(CapacityError):
    """The key has no tokens left in this month."""

    status = 429
    code = "insufficient_quota"


class Overloaded(CapacityError):
    """The request waited too long for its turn."""


class StoreUnavailable(CapacityError):
    """The database does not answer."""

    code = "store_unavailable"

    def __init__(
        self,
        message: str = "the server's database cannot be used now; try again in 5 s",
        *,
        retry_after_s: int = 5,
        reason: str = "",
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason  # What it says itself, for those who run the server.


class JournalFull(CapacityError):
    """Journals of answers that run take all the room that they may take."""

    code = "journal_full"


class EngineError(LegatoError):
    """Ours or the engine's fault."""

    status = 500
    code = "engine_error"


class GenerationFailed(EngineError):
    """An accepted Job could not be finished."""

    code = "generation_failed"


class EngineUnavailable(EngineError):
    """The engine does not run now."""

    status = 503
    code = "engine_unavailable"
    retry_after_s = 5


class ConfigError(LegatoError):
    """The configuration, a model file or the machine does not allow a start."""

    code = "config_error"
