"""Legato continues text so that the join cannot be seen."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the clients when they are asked for: `import legato` loads no HTTP library."""
    if name in ("AsyncClient", "Client"):
        return getattr(importlib.import_module("legato.client"), name)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
