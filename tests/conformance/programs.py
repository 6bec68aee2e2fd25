"""Programs in the languages of clients' users. Those that need packages which others must not see get them once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served

_CLIENTS = Path(__file__).parent / "clients"
_BIN = Path(sys.executable).parent
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    ".java": ("java", "--source", "17", "/dev/stdin"),
    ".mjs": (str(_BIN / "node"), "--input-type=module", "-"),
    ".py": (sys.executable, "-"),
    ".sh": ("bash", "-euo", "pipefail", "-s"),
}
_INSTALLS: Mapping[str, tuple[str, ...]] = {
    "package.json": (str(_BIN / "npm"), "install", "--no-package-lock", "--no-audit", "--no-fund"),
    "requirements.txt": (
        *(sys.executable, "-m", "pip", "install", "--no-compile"),
        *("--target", ".", "--requirement", "requirements.txt"),
    ),
}


def run(language: str, text: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run a program in a folder, with environment variables; return what it printed."""
    command = _COMMANDS[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as source:  # Java reads a file twice.
        source.write(text)
        source.seek(0)
        done = subprocess.run(
            [*command, *arguments],
            stdin=source,
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask_client(program: str, folder: Path, served: Served, *arguments: str) -> Any:
    """Run a program of `clients/`, with packages from a folder; return the JSON that it printed."""
    path = _CLIENTS / program
    given = (served.url, served.name, *arguments)
    return json.loads(run(path.suffix, path.read_text("utf-8"), folder, *given, PYTHONPATH=str(folder)))


def install(cache: pytest.Cache, manifest: str) -> Path:
    """Return a folder with the packages of a manifest of `clients/`, installed anew when it or the Python changes."""
    source, command = _CLIENTS / manifest, _INSTALLS[manifest]
    key = hashlib.sha256(source.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    folder = cache.mkdir("clients") / key
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            fresh = Path(temporary) / "fresh"
            fresh.mkdir()
            shutil.copy(source, fresh)
            done = subprocess.run(command, cwd=fresh, capture_output=True, encoding="utf-8")
            assert done.returncode == 0, done.stderr
            fresh.rename(folder)
    return folder
