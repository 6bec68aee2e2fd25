"""`python -m bench` measures a real server and writes down what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.prompting.profiles import InfillTokens
from tests.conftest import Served, serve_script
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script((b" word",) * 20, infill=InfillTokens(1, 2, 3), context_length=32768) as server:
        yield server


def test_a_run_leaves_a_table_figures_and_a_plot(served: Served, tmp_path: Path) -> None:
    suites = "decode,warm,keys,rounds,drafts,constraint,seam,human,infill,streams"
    beside = ["--beside", f"again={served.url}/v1", "--suite", suites, "--out", str(tmp_path), "--size", "quick"]
    command = [sys.executable, "-m", "bench", served.url, *beside]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "bench.md").read_text("utf-8").splitlines()
    assert table[0] == "| suite | measure | unit | Legato | again | Legato is better by |"
    assert [line for line in table[2:] if f"{line}\n" not in done.stdout] == []
    facts = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert facts["servers"]["again"] == {"url": f"{served.url}/v1", "model": served.name}
    assert {measure["suite"] for measure in facts["measures"]} == set(suites.split(","))
    hits = [measure["samples"]["Legato"] for measure in facts["measures"] if measure["suite"] == "seam"]
    assert all(set(samples) <= {0.0, 1.0} for samples in hits)
    speeds = [measure["samples"]["again"] for measure in facts["measures"] if measure["suite"] == "decode"]
    assert all(sample > 0 for samples in speeds for sample in samples)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_suite_is_named(served: Served) -> None:
    command = [sys.executable, "-m", "bench", served.url, "--suite", "decode,speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no such suite: speed" in done.stderr
