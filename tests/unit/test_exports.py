"""What modules say they offer, and what importing them costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import legato
from legato import errors
from legato.errors import CapacityError, KeyMissing, LegatoError

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(legato.__path__, "legato.")
    # Which are run, loaded as a library, and imported where vLLM is; not here.
    if not module.name.endswith(("__main__", "migrations.env", "._matmul", "legato.vllm"))
)


def rank(name: str) -> tuple[bool, bool, str]:
    """The order that ruff keeps: constants, classes, the rest."""
    return (not name.isupper(), name[:1].islower(), name)


@pytest.mark.parametrize("name", ["legato", *MODULES])
def test_all_is_sorted_and_true(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert names or module.__file__ is None or module.__file__.endswith("__init__.py")
    assert names == sorted(set(names), key=rank)
    assert [name for name in names if not hasattr(module, name)] == []
    assert [name for name in names if name.startswith("_") and not name.startswith("__")] == []


def loaded_by(statement: str) -> set[str]:
    """Return the modules that are loaded after a statement in a new process."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import legato", "import legato.cli", "import legato.run.plan, legato.run.models"]
)
def test_what_is_not_needed_is_not_loaded(statement: str) -> None:
    heavy = {"starlette", "uvicorn", "pydantic", "httpx2", "llama_cpp", "huggingface_hub", "openai"}
    assert loaded_by(statement) & heavy == set()


def subclasses(kind: type[LegatoError]) -> Iterator[type[LegatoError]]:
    """Yield every error below one."""
    for below in kind.__subclasses__():
        if below.__module__.startswith("legato."):
            yield below
            yield from subclasses(below)


def test_errors_are_told_apart_and_exported() -> None:
    for name in MODULES:
        importlib.import_module(name)
    kinds: list[type[LegatoError]] = [LegatoError, *subclasses(LegatoError)]
    assert [kind for kind in kinds if not 400 <= kind.status <= 599] == []
    ours = [kind for kind in kinds if kind.__module__ == "legato.errors"]
    assert sorted(kind.__name__ for kind in ours) == errors.__all__
    # `Overloaded` is what a lack of capacity is called, and a missing key is as good as a wrong one where a dialect
    # does not tell them apart; every other kind has a code of its own.
    codes = [kind.code for kind in ours if kind not in (CapacityError, KeyMissing)]
    assert len(codes) == len(set(codes))
