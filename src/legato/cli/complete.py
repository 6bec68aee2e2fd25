"""`legato complete`"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from legato.cli import say
from legato.cli.options import config_option, decode, ensure_pulled, model_option, settings_for
from legato.cli.terminal import is_watched, loading
from legato.config import Settings
from legato.errors import InvalidField
from legato.types import CompletionRequest, Delta, Finished, Output, SamplingOptions, Text

__all__ = ["command"]

_FILE_NAME = re.compile(r"[\w./~-]*\w\.[A-Za-z]\w{0,4}", re.ASCII)
"""What is probably meant as the name of a file."""


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
        InvalidField: it is a folder, or not UTF-8.
    """
    if text == "-":
        return decode(sys.stdin.buffer.read(), "standard input")
    found = _found(text)
    if found == "file":
        return decode(Path(text).read_bytes(), text)
    if found == "folder":
        raise InvalidField(f"{text} is a folder, and TEXT a file or a text (one that is a folder's name: through -)")
    if found == "nothing":
        say(f"there is no file {text}, so this name itself is continued")
    return decode(text.encode("utf-8", "surrogateescape"), "TEXT")


def _found(text: str) -> Literal["file", "folder", "nothing"] | None:
    """Return what is found where a text that may be the name of a file leads; None: it is a text."""
    path = Path(text)
    try:
        if text and path.is_dir():
            return "folder"
        if path.is_file():
            return "file"
        is_name = _FILE_NAME.fullmatch(text) or (re.fullmatch(r"\S*/[^\s/]+", text) and path.parent.is_dir())
    except (OSError, ValueError):
        return None
    return "nothing" if is_name else None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say_cut(num_tokens: int, max_tokens: int) -> None:
    """Say that the text would go on."""
    more = "--max-tokens allows more" if num_tokens >= max_tokens else "the model's context is full"
    say(f"cut after {num_tokens} tokens: {more}")


async def _complete(prompt: str, settings: Settings, options: _Options) -> None:
    from legato.run.models import load_models
    from legato.run.plan import plan

    async with loading(next(iter(settings.models))):
        models = await load_models(settings)
    try:
        request = CompletionRequest(
            model=models.own[0].name,
            source=Text((prompt,)),
            sampling=SamplingOptions(temperature=options.temperature, seed=options.seed),
            max_tokens=options.max_tokens,
            output=Output(stream=True, echo=options.echo),
        )
        last, end = "", None
        async with aclosing(plan(request, models.own[0]).events()) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    _write(event.text)
                    last = event.text
                elif isinstance(event, Finished):
                    end = event
        if sys.stdout.isatty() and not last.endswith("\n"):
            _write("\n")
        if end is not None and end.reason == "length" and options.max_tokens and is_watched():
            _say_cut(end.usage.completion_tokens, options.max_tokens)
    finally:
        await models.aclose()
