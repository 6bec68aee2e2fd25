"""`legato complete`"""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import click

from legato.cli.options import config_option, decode, ensure_pulled, model_option, settings_for
from legato.config import Settings
from legato.types import CompletionRequest, Delta, Output, SamplingOptions, Text

__all__ = ["command"]


@dataclass(frozen=True)
class _Options:
    """How to continue."""

    max_tokens: int
    temperature: float
    seed: int | None
    echo: bool


@click.command("complete")
@click.argument("text")
@config_option
@model_option
@click.option("--max-tokens", type=click.IntRange(min=0), default=128, show_default=True, help="Most tokens to write.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--seed", type=click.IntRange(-(2**63), 2**64 - 1), help="Makes a sampled answer repeatable.")
@click.option("--echo", is_flag=True, help="Print the text before its continuation.")
def command(
    text: str,
    config_file: Path | None,
    model: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    echo: bool,
) -> None:
    """Continue TEXT, and print what follows as it comes.

    TEXT is the text itself, the name of an existing file, or - for standard input. Every byte counts, also blanks and
    line ends at the end.
    """
    if math.isnan(temperature):
        raise click.BadParameter("nan is not in the range 0<=x<=2.", param_hint="'--temperature'")
    prompt = _read(text)
    settings = settings_for(config_file, model)
    ensure_pulled(settings)
    asyncio.run(_complete(prompt, settings, _Options(max_tokens, temperature, seed, echo)))


def _read(text: str) -> str:
    """Return the text that is meant.

    Raises:
        InvalidField: it is not UTF-8.
    """
    if text == "-":
        return decode(sys.stdin.buffer.read(), "standard input")
    try:
        path = Path(text)
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return decode(path.read_bytes(), text)
    return decode(text.encode("utf-8", "surrogateescape"), "TEXT")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _complete(prompt: str, settings: Settings, options: _Options) -> None:
    from legato.models import load_models
    from legato.pipeline import plan

    models = await load_models(settings)
    try:
        request = CompletionRequest(
            model=models.own[0].name,
            source=Text((prompt,)),
            sampling=SamplingOptions(temperature=options.temperature, seed=options.seed),
            max_tokens=options.max_tokens,
            output=Output(stream=True, echo=options.echo),
        )
        last = ""
        async with aclosing(plan(request, models.own[0]).events()) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    _write(event.text)
                    last = event.text
        if sys.stdout.isatty() and not last.endswith("\n"):
            _write("\n")
    finally:
        await models.aclose()
