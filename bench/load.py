"""What the server costs beside the model: `python -m bench.load` serves the scripted engine on one core.

Many clients on the other cores read streams and check every event; then single requests tell the processor time of a
plain request without a key, and with a key whose limits are counted in the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import click
import httpx2

from bench.client import serving
from bench.scripted import SCRIPT
from legato.storage.keys import Key
from legato.storage.store import Store

__all__ = ["Streams", "apart", "on_core", "streams"]

_TEXT = b"".join(SCRIPT)
_PIECE = re.compile(rb'"text":\s*"([^"]*)"')
_MIB = 2**20
_BLOCK = 100
"""Requests that are timed together: the clock of processor time has a hundredth of a second."""
_LIMITED = Key("limited", requests_per_minute=10**9, tokens_per_minute=10**12, tokens_per_month=10**15)


@dataclass(frozen=True)
class Streams:
    """What came of many streams at once."""

    events: int
    seconds: float
    cpu_s: float
    """Processor time of the server."""
    wrong: int
    """Streams in which something was lost, doubled or in another order."""
    memory: Sequence[int]
    """Of the server in bytes, once a second."""


@contextmanager
def apart() -> Iterator[int]:
    """Leave the first core to a server; yield it."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        yield cores[0]
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def on_core(core: int, key: Key | None = None) -> Iterator[tuple[str, int, str]]:
    """Serve on a core, to a key if there is one. Yield the address, the server's process, and what the key is."""
    with TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/legato.db"
        with closing(Store.open(database)) as store:
            secret = "none" if key is None else store.create_key(key)
        with serving("bench.scripted", str(core), database) as (url, pid):
            yield url, pid, secret


async def streams(url: str, pid: int, num_clients: int, seconds: float) -> Streams:
    """Read streams for some time, each client one after the other and at least one; all are read to their end."""
    parts = urlsplit(url)
    body = b'{"model": "script", "prompt": "Go.", "max_tokens": 4000, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    events = wrong = 0
    start, cpu_s = time.perf_counter(), _cpu_s(pid)

    async def read() -> None:
        nonlocal events, wrong
        while True:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(request)
            answer = await reader.read(-1)
            writer.close()
            events += answer.count(b"data: {")
            wrong += b"".join(_PIECE.findall(answer)) != _TEXT or b"data: [DONE]\n\n" not in answer
            if time.perf_counter() - start >= seconds:
                return

    async def watch() -> None:
        while True:
            memory.append(_resident(pid))
            await asyncio.sleep(1)

    memory: list[int] = []
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(read() for _ in range(num_clients)))
    watching.cancel()
    return Streams(events, time.perf_counter() - start, _cpu_s(pid) - cpu_s, wrong, [*memory, _resident(pid)])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _requests(core: int, num: int) -> dict[str, float]:
    """Return the processor time of a plain request in milliseconds, by who asks; they ask in turn."""
    body = json.dumps({"model": "script", "prompt": "Go.", "max_tokens": 16}).encode()
    keys = {"without a key": None, "with a key": Key("plain"), "with a key and its limits": _LIMITED}
    with ExitStack() as stack:
        asking = {}
        for name, key in keys.items():
            url, pid, secret = stack.enter_context(on_core(core, key))
            headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
            asking[name] = (pid, stack.enter_context(httpx2.Client(base_url=url, headers=headers)))
        times: dict[str, list[float]] = {name: [] for name in asking}
        for turn in range(1 + num // _BLOCK):
            for name, (pid, client) in asking.items():
                before = _cpu_s(pid)
                for _ in range(_BLOCK):
                    client.post("/v1/completions", content=body).raise_for_status()
                if turn:  # The first block warms up.
                    times[name].append(1000 * (_cpu_s(pid) - before) / _BLOCK)
    return {name: statistics.fmean(some) for name, some in times.items()}


@click.command()
@click.option("--seconds", type=float, default=600, show_default=True, help="How long streams are read.")
@click.option("--clients", type=int, default=300, show_default=True, help="How many read at once.")
@click.option("--requests", type=int, default=2000, show_default=True, help="How many plain requests are timed.")
def main(seconds: float, clients: int, requests: int) -> None:
    """Measure what the server costs beside the model."""
    with apart() as core:
        with on_core(core) as (url, pid, _):
            found = asyncio.run(streams(url, pid, clients, seconds))
        warm = [size / _MIB for size in found.memory[len(found.memory) // 10 :]]
        click.echo(f"{clients} streams for {found.seconds:.0f} s: {found.events} events, {found.wrong} streams wrong")
        rate, worth = found.events / found.seconds, found.events / found.cpu_s
        click.echo(f"{rate:.0f} events/s, {worth:.0f} per second of processor time")
        click.echo(f"memory: {warm[0]:.1f} MiB after a tenth, at most {max(warm):.1f}, {warm[-1]:.1f} at the end")
        for name, spent in _requests(core, requests).items():
            click.echo(f"a plain request {name}: {spent:.2f} ms of processor time")


if __name__ == "__main__":
    main()
