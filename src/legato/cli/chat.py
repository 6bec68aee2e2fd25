"""`legato chat`"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click

from legato.cli.backend import Backend, backend_options
from legato.cli.options import decode
from legato.client.protocol import DialectName

__all__ = ["command"]


@click.command("chat")
@backend_options
@click.option("--prefix", default="", help="How every answer begins.")
@click.option("--as", "name", metavar="NAME", help="Who answers: the model speaks as NAME, which is not printed.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Most tokens per answer."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0: always the likeliest token."
)
def command(
    config_file: Path | None,
    model: str | None,
    provider: DialectName | None,
    url: str | None,
    prefix: str,
    name: str | None,
    max_tokens: int,
    temperature: float,
) -> None:
    """Talk: every line of standard input is a turn, and the answer is printed as it comes.

    With --prefix each answer is continued from there. With --as the model plays a role: set the scene in the first
    turn. The end of the input, or Ctrl-C, ends it.
    """
    backend = Backend(config_file, model, provider, url)
    asyncio.run(_chat(backend, prefix, name, max_tokens, temperature))


async def _chat(backend: Backend, prefix: str, name: str | None, max_tokens: int, temperature: float) -> None:
    async with backend.connect() as client:
        turns: list[dict[str, Any]] = []
        while line := _read_line():
            turns.append({"role": "user", "content": decode(line.rstrip(b"\r\n"), "standard input")})
            answer = client.write(turns, prefix, name=name, max_total_tokens=max_tokens, temperature=temperature)
            _print(prefix)
            async with aclosing(aiter(answer)) as pieces:
                async for piece in pieces:
                    _print(piece)
            _print("\n")
            turns.append({"role": "assistant", "content": answer.completion.whole, **({"name": name} if name else {})})


def _read_line() -> bytes:
    """Wait for a line; empty: there are no more. Ctrl-C ends the wait, of which asyncio alone would only take note."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return sys.stdin.buffer.readline()
    finally:
        signal.signal(signal.SIGINT, before)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
