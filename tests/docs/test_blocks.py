"""The code blocks of the pages are run, in order.

A comment in the line before a block says what it is: `server` starts a server for the blocks that follow, `tested` is
run, `output` is what the block before it printed, `body: PATH` is posted to the server. The pages write port 8080;
here every server gets a free one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from legato.config import load_settings
from tests.conftest import NO_TLS
from tests.docs.pages import PAGES, README, ROOT, Block, blocks

_ADDRESS = "http://127.0.0.1:8080"
_RUN_PAGES = [page for page in PAGES if any(block.mark == "server" for block in blocks(page))]


def environment() -> dict[str, str]:
    """Return an environment in which `legato` and `python` are the ones under test."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def server(command: str, folder: Path) -> Iterator[str]:
    """Run a block that starts a server, on a free port; yield its address."""
    process = subprocess.Popen(
        [*shlex.split(command), "--port", "0"], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"Legato serves .* at (http://\S+)/v1\n", line)
        assert found, f"`{command}` said: {line}"
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def run(block: Block, address: str, folder: Path) -> str:
    """Run a block and return what it printed."""
    text = block.text.replace(_ADDRESS, address)
    command = {"sh": ["bash", "-euo", "pipefail", "-c", text], "python": [sys.executable, "-c", text]}[block.language]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{block.text}\n{done.stderr}"
    if text.startswith("curl"):
        assert "error" not in json.loads(done.stdout), done.stdout
    return done.stdout


def check(printed: str, block: Block) -> None:
    """Compare with an output: JSON but for what is new each time, other text as it is, and `[…]` stands for any."""
    if block.language == "json":
        mine, theirs = ({**json.loads(text), "id": "", "created": 0} for text in (printed, block.text))
        assert mine == theirs
    elif "[…]" in block.text:
        first, last = block.text.split("[…]")
        assert printed.startswith(first)
        assert printed.rstrip("\n").endswith(last.rstrip("\n"))
    else:
        assert printed.rstrip("\n") == block.text.rstrip("\n")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", _RUN_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None and any(block.text.startswith("curl") for block in blocks(page)):
        pytest.skip("curl is not installed")
    address, printed = "", ""
    with ExitStack() as servers:
        for block in blocks(page):
            kind, _, rest = block.mark.partition(": ")
            match kind:
                case "server":
                    servers.close()
                    address = servers.enter_context(server(block.text, tmp_path))
                case "tested":
                    printed = run(block, address, tmp_path)
                case "output":
                    check(printed, block)
                case "body":
                    response = httpx2.post(address + rest, json=json.loads(block.text), timeout=100, verify=NO_TLS)
                    assert response.status_code == 200, f"{block.text}\n{response.text}"


def test_every_mark_is_known() -> None:
    marks = {block.mark.partition(": ")[0] for page in PAGES for block in blocks(page)}
    known = {"server", "tested", "output", "body", "legato.toml", "run command", "test command", "backup", "restore"}
    assert {mark for mark in marks if mark and not mark.startswith("help")} == known


def test_the_main_job_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README) if block.mark == "run command"]
    install, command = block.text.strip().split(" && ")
    assert install == "pip install '.[local]'"
    done = subprocess.run(
        shlex.split(command), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("\n    ")


def test_ci_finds_the_test_command_in_the_readme() -> None:
    (block,) = [block for block in blocks(README) if block.mark == "test command"]
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines() if line.startswith("command=")]
    script = f'{line}\nprintf %s "$command"'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == block.text.strip() == "pip install -e '.[local,dev]' && just ci"


def test_the_settings_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    (block,) = [block for page in PAGES for block in blocks(page) if block.mark == "legato.toml"]
    path = tmp_path / "legato.toml"
    path.write_text(block.text, "utf-8")
    settings = load_settings(path, flags={}, default_model="m")
    assert settings.aliases["gpt-3.5-turbo-instruct"] in settings.models
