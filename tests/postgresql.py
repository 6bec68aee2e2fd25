"""A PostgreSQL server for tests, from the system's package."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@contextmanager
def serve_postgresql() -> Iterator[str]:
    """Run a server on a socket in a folder of its own; give the URL of its database. Skips the test without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    with TemporaryDirectory() as folder:
        user = None
        if os.geteuid() == 0:  # Which it refuses to run as.
            user = "postgres"
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

        def run(program: str, *arguments: str) -> None:
            command = [str(found[-1] / program), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)

        run("initdb", "--auth=trust", "--username=legato", "--no-sync")
        run("pg_ctl", "start", "-w", "-l", f"{folder}/log", "-o", f"-F -k {folder} -c listen_addresses=''")
        try:
            yield f"postgresql://legato@/postgres?host={folder}"
        finally:
            run("pg_ctl", "stop", "-m", "immediate")
