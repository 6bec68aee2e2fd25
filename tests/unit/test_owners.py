"""Whatever runs beside something else has an owner: tasks and threads are made in one place each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import legato

SOURCES = Path(legato.__file__).parent
OWNERS = {
    "system/supervisor.py": {"create_task", "ensure_future", "gather", "TaskGroup"},
    "system/threads.py": {"to_thread", "run_in_executor"},
}


def used(source: str) -> set[str]:
    """The names and attributes in a module."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("owner", OWNERS)
def test_nobody_else_makes_them(owner: str) -> None:
    makers = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if OWNERS[owner] & used(file.read_text("utf-8"))
    }
    assert makers - {owner} == set()
