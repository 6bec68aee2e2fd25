"""Legato continues text so that the join cannot be seen."""

__all__ = ["__version__"]

__version__ = "0.1.0"
