"""What a key is: a name, rights and limits. The secret is shown once; only its hash is stored."""

import hashlib
import re
import secrets
from dataclasses import dataclass

__all__ = ["ANYONE", "KEY_NAME", "Key", "hash_key", "new_key"]

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Key:
    """A caller's key: rights and limits. A limit of None: unlimited."""

    name: str
    prefix: str = ""
    """The first characters of the key, so that its owner recognises it."""
    models: tuple[str, ...] = ()
    """Names and aliases of models it may use; none: any."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_month: int | None = None
    control_tokens: bool = True
    """Whether the text of a raw prompt may have control tokens."""
    admin: bool = False
    """Whether it may manage keys, and see everybody's usage and the metrics."""
    created_at: int = 0
    expires_at: int | None = None
    revoked_at: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether its requests or tokens must be counted."""
        return any(
            limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_month)
        )


ANYONE = Key("")
"""The caller of a server without keys."""


def hash_key(key: bytes) -> bytes:
    """Return the hash that is stored of a key. Keys are long and random, so a plain hash needs no salt."""
    return hashlib.sha256(key).digest()


def new_key() -> tuple[str, str]:
    """Return a key and the part of it that may be shown."""
    prefix = f"lg-{secrets.token_hex(4)}"
    return f"{prefix}-{secrets.token_urlsafe(32)}", prefix
