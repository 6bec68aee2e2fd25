"""The unit, the container file and the commands of the page on deployment do what the page says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from legato.config import LimitSettings, load_settings
from legato.engines.llamacpp.engine import _SPILL_S
from legato.storage.keys import Key
from legato.storage.store import Store
from tests.conftest import NO_TLS
from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.test_blocks import environment

DEPLOY = ROOT / "deploy"
PAGE = DOCS / "deployment.md"


def unit() -> dict[str, str]:
    """The settings of the service."""
    lines = (DEPLOY / "legato.service").read_text("utf-8").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines if not line.startswith("#"))}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file."""
    text = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


@contextmanager
def serving(
    command: list[str], variables: Mapping[str, str], folder: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command that serves; return the process, and its URL once it does."""
    with subprocess.Popen(
        command, env={**environment(), **variables}, cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("Legato serves"), line
            yield process, line.split(" at ")[1].strip()
        finally:
            process.kill()


# -- systemd ----------------------------------------------------------------------------------------------------------


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "legato.service"
    text = (DEPLOY / "legato.service").read_text("utf-8")
    file.write_text(text.replace("/opt/legato/bin/legato", shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "legato" in line]
    assert ours == []


def test_the_unit_starts_a_server_and_ends_it_in_time(tmp_path: Path) -> None:
    found = unit()
    path, *arguments = shlex.split(found["ExecStart"])
    assert path == "/opt/legato/bin/legato"
    file = tmp_path / "legato.toml"
    text = (DEPLOY / "legato.toml").read_text("utf-8")
    state = f"/var/lib/{found['StateDirectory']}"
    assert str(load_settings(DEPLOY / "legato.toml", flags={}, default_model="m").data_dir) == state
    assert found["WorkingDirectory"] == state
    file.write_text(text.replace(state, str(tmp_path / "state")).replace("port = 8080", "port = 0"))
    mapped = [str(file) if argument == "/etc/legato/legato.toml" else argument for argument in arguments]
    with serving([sys.executable, "-m", "legato", *mapped, "--demo"], {}, tmp_path) as (process, url):
        assert httpx2.get(url + "/models", verify=NO_TLS).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(int(found["TimeoutStopSec"])) == 0
    assert int(found["TimeoutStopSec"]) > LimitSettings().grace_s + _SPILL_S
    file.write_text(file.read_text() + "[sever]\n")
    done = subprocess.run([sys.executable, "-m", "legato", *mapped], capture_output=True)
    assert str(done.returncode) == found["RestartPreventExitStatus"]


# -- containers -------------------------------------------------------------------------------------------------------


def test_the_container_file_copies_and_installs_what_there_is() -> None:
    copied = [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]
    (extras,) = [rest.partition("=")[2] for name, rest in instructions() if name == "ARG" and rest.startswith("EXTRAS")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"pyproject.toml", "src", "docs", "hatch_build.py", project["project"]["readme"]} <= set(copied)
    assert all((ROOT / source).exists() for source in copied if not source.startswith(("--", "/")))
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


def test_the_container_wants_a_key_and_serves_all_addresses(tmp_path: Path) -> None:
    given = dict(instructions())
    command = [sys.executable, "-m", *re.findall('"([^"]+)"', given["ENTRYPOINT"] + given["CMD"])]
    assert "LEGATO_DATA_DIR=/data" in given["ENV"]
    variables = {"LEGATO_DATA_DIR": str(tmp_path / "data"), "LEGATO_SERVER_PORT": "0"}
    done = subprocess.run(
        [*command, "--demo"], env={**environment(), **variables}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, "there are no keys" in done.stderr) == (2, True)
    create = [sys.executable, "-m", "legato", "keys", "create", "alice"]
    key = subprocess.run(create, env={**environment(), **variables}, capture_output=True, text=True, check=True)
    with serving([*command, "--demo"], variables, tmp_path) as (_, url):
        assert url.startswith("http://0.0.0.0:")
        headers = {"Authorization": f"Bearer {key.stdout.strip()}"}
        here = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx2.get(here + "/models", headers=headers, verify=NO_TLS).status_code == 200
        assert httpx2.get(here + "/models", verify=NO_TLS).status_code == 401


# -- backup and restore -----------------------------------------------------------------------------------------------


def test_a_backup_of_a_running_server_can_be_restored(tmp_path: Path) -> None:
    state, backups = tmp_path / "state", tmp_path / "backups"
    backups.mkdir()
    texts = {block.mark: block.text for block in blocks(PAGE) if block.mark in ("backup", "restore")}

    def run(mark: str) -> None:
        text = texts[mark].replace("/var/lib/legato", str(state)).replace("/var/backups", str(backups))
        text = text.replace("-o legato -g legato ", "")
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], env=environment(), check=True)

    with closing(Store.open(f"sqlite:///{state}/legato.db")) as store:
        store.create_key(Key("before"))
        for _ in range(2):
            run("backup")
        store.create_key(Key("after"))
        for path in state.iterdir():  # As a server leaves it that is killed.
            shutil.copy(path, tmp_path)
    for path in tmp_path.glob("legato.db*"):
        shutil.copy(path, state)
    assert (state / "legato.db-wal").exists()
    run("restore")
    assert os.stat(state / "legato.db").st_mode & 0o777 == os.stat(backups / "legato.db").st_mode & 0o777 == 0o600
    with closing(Store.open(f"sqlite:///{state}/legato.db")) as store:
        (key,) = store.keys()
        assert key.name == "before"
