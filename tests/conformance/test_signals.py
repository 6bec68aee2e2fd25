"""A server that is told to stop with all its processes, as service managers and Ctrl-C do: its streams end whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import pytest

from legato.system.signals import ENDING
from tests.conftest import SMALL, children, running

NUM_STREAMS = 4
NUM_TOKENS = 120


@contextmanager
def group(folder: Path, model: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that leads a process group, and its URL. `before`: what runs it."""
    command = [*before, sys.executable, "-m", "legato", "serve", "--model", model, "--port", "0"]
    environment = {**os.environ, "LEGATO_LIMITS_GRACE_S": "60", "LEGATO_STORE_URL": f"sqlite:///{folder}/legato.db"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("Legato serves"))
            yield process, line.split(" at ")[1].strip()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_to_the_whole_group_lets_streams_end(tmp_path: Path, number: signal.Signals) -> None:
    begun = threading.Barrier(NUM_STREAMS + 1)

    with group(tmp_path, SMALL) as (process, url), openai.OpenAI(base_url=url, api_key="none") as client:

        def stream(seed: int) -> tuple[int, str | None]:
            answer = client.completions.create(
                model=SMALL,
                prompt="Once upon a time,",
                max_tokens=NUM_TOKENS,
                seed=seed,
                stream=True,
                extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
            )
            first = next(iter(answer))
            begun.wait(60)
            chunks = [first, *answer]
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            return chunks[-1].usage.completion_tokens if chunks[-1].usage else 0, reasons[-1]

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(stream, seed) for seed in range(NUM_STREAMS)]
            begun.wait(60)
            workers = children(process.pid)
            assert workers
            os.killpg(process.pid, number)
            time.sleep(0.3)
            os.killpg(process.pid, number)  # Again, as those do who are impatient.
            assert running().keys() >= set(workers)
            assert [answer.result() for answer in streams] == [(NUM_TOKENS, "length")] * NUM_STREAMS
        assert process.wait(30) == 0
        assert not running().keys() & set(workers)


def test_a_worker_leaves_when_its_server_is_killed(tmp_path: Path) -> None:
    with group(tmp_path, SMALL) as (process, _):
        workers = children(process.pid)
        process.kill()
        process.wait(10)
        until = time.monotonic() + 10
        while running().keys() & set(workers):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with (
        group(tmp_path, SMALL, "nohup") as (process, url),
        openai.OpenAI(base_url=url, api_key="none") as client,
    ):
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert client.models.list().data[0].id == SMALL
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
