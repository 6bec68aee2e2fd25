"""What a key is: a name, rights and limits. The secret is shown once; only its hash is stored."""

import hashlib
import re
import secrets
from dataclasses import dataclass

__all__ = ["ANYONE", "KEY_NAME", "Key", "hash_key", "new_key"]

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Key:
    """Who asks, and what they may do. None: as much as they want."""

    name: str
    prefix: str = ""
    """How the key itself begins, by which its owner knows it."""
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
        """Whether what it spends must be counted."""
        return any(
            limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_month)
        )


ANYONE = Key("")
"""The caller of a server without keys."""


def hash_key(key: bytes) -> bytes:
    """Return what is kept of a key. It is long and random, so a plain hash does not give it away."""
    return hashlib.sha256(key).digest()


def new_key() -> tuple[str, str]:
    """Return a key and the part of it that may be shown."""
    prefix = f"lg-{secrets.token_hex(4)}"
    return f"{prefix}-{secrets.token_urlsafe(32)}", prefix
