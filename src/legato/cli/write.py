"""`legato write`"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from legato.cli.backend import Backend, backend_options
from legato.cli.options import decode
from legato.client.protocol import Completion, DialectName, Options

__all__ = ["command"]

_ROUND_TOKENS = 256
"""So often the file is brought to the disk."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class _Limits:
    """How far, and how."""

    max_tokens: int
    until: str | None
    temperature: float
    seed: int | None

    def options(self, *, is_legato: bool) -> Options:
        """Return them as a request has them. The file is one text, so a stop may begin in what it has already."""
        options = Options(temperature=self.temperature, max_tokens=_ROUND_TOKENS)
        if self.seed is not None:
            options["seed"] = self.seed
        if self.until is not None:
            options["stop"] = [self.until]
            if is_legato:
                options["extra"] = {"stop_across_seam": True}
        return options


@click.command("write")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, writable=True, path_type=Path))
@backend_options
@click.option("--max-tokens", type=click.IntRange(min=1), default=1000, show_default=True, help="Most tokens to write.")
@click.option("--until", help="Stop before this text; it is not written.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Makes a sampled text repeatable.")
def command(
    file: Path,
    config_file: Path | None,
    model: str | None,
    provider: DialectName | None,
    url: str | None,
    max_tokens: int,
    until: str | None,
    temperature: float,
    seed: int | None,
) -> None:
    """Continue FILE in place: append what follows, as it comes.

    What is written stays, also after Ctrl-C or a failure, and the next run goes on behind it. Where an answer is cut or
    a stream breaks off, the next request goes on from there; with each the file is brought to the disk. Progress is
    shown on standard error.
    """
    text = decode(file.read_bytes().removeprefix(_BOM), str(file))
    backend = Backend(config_file, model, provider, url)
    asyncio.run(_write(file, text, backend, _Limits(max_tokens, until, temperature, seed)))


async def _write(file: Path, text: str, backend: Backend, limits: _Limits) -> None:
    options = limits.options(is_legato=backend.provider in (None, "legato"))
    async with backend.connect() as client:
        writing = client.write(text, max_total_tokens=limits.max_tokens, **options)
        with file.open("ab") as out:
            progress = _Progress()
            num_rounds = 0
            try:
                async with aclosing(aiter(writing)) as pieces:
                    async for piece in pieces:
                        if writing.completion.num_rounds > num_rounds:
                            num_rounds = writing.completion.num_rounds
                            _sync(out)
                        out.write(piece.encode())
                        out.flush()
                        progress.show(writing.completion)
            finally:
                _sync(out)
                progress.end(writing.completion)


def _sync(out: BinaryIO) -> None:
    """Bring all that was written to the disk."""
    out.flush()
    os.fsync(out.fileno())


class _Progress:
    """A line on standard error: over and over on a terminal, once at the end elsewhere."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def show(self, completion: Completion) -> None:
        """Say how far it is, if somebody is there to see it move."""
        if sys.stderr.isatty():
            click.echo(f"\r{self._line(completion)}", nl=False, err=True)

    def end(self, completion: Completion) -> None:
        """Say how far it came."""
        start = "\r" if sys.stderr.isatty() else ""
        click.echo(f"{start}{self._line(completion)}, {completion.finish_reason or 'interrupted'}", err=True)

    def _line(self, completion: Completion) -> str:
        rate = completion.num_tokens / max(time.monotonic() - self._begun, 0.001)
        num_rounds = completion.num_rounds + (completion.finish_reason is None)
        return f"{completion.num_tokens} tokens, {rate:.1f} tokens/s, round {num_rounds}"
