"""`legato infill`"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import click

from legato.cli.options import config_option, ensure_pulled, model_option, settings_for
from legato.cli.terminal import loading
from legato.config import Settings
from legato.errors import InvalidField
from legato.types import CompletionRequest, Delta, GapEnd, Infill, Output, SamplingOptions

__all__ = ["command"]

_LANGUAGES = {
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".hpp": "cpp",
    ".go": "go",
    ".java": "java",
    ".js": "javascript",
    ".mjs": "javascript",
    ".py": "python",
    ".rs": "rust",
    ".ts": "typescript",
}
"""What a file is written in, by the end of its name."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file, cut at the cursor."""

    path: Path
    encoding: str
    prefix: str
    suffix: str


@click.command("infill")
@click.argument("place", metavar="FILE:LINE:COL")
@config_option
@model_option
@click.option("--max-tokens", type=click.IntRange(min=0), default=128, show_default=True, help="Most tokens to write.")
@click.option(
    "--end",
    type=click.Choice(["suffix", "line", "block"]),
    default="suffix",
    show_default=True,
    help="End where the text after the gap would be repeated, or also with the line, or with the block it is in.",
)
@click.option("--write", is_flag=True, help="Insert the text into the file.")
def command(place: str, config_file: Path | None, model: str | None, max_tokens: int, end: GapEnd, write: bool) -> None:
    """Fill the gap at FILE:LINE:COL, and print what belongs there.

    LINE and COL count from 1; COL counts characters, and COL 1 is before the first. The file's encoding and line ends
    stay as they are. With --write the file is replaced as a whole, so that a crash leaves the old one.
    """
    source = _read(place)
    language = _LANGUAGES.get(source.path.suffix, "")
    if end == "block" and not language:
        raise InvalidField(
            f"--end block needs a file of a known kind ({', '.join(_LANGUAGES)}), got {source.path.name}"
        )
    settings = settings_for(config_file, model)
    ensure_pulled(settings)
    gap = Infill(source.prefix, source.suffix, end=end, language=language)
    text = asyncio.run(_fill(gap, settings, max_tokens))
    if write:
        _replace(source, text)
    sys.stdout.write(text)
    if sys.stdout.isatty() and not text.endswith("\n"):
        sys.stdout.write("\n")


def _read(place: str) -> _Source:
    """Return the file at a place, cut there.

    Raises:
        InvalidField: the place is not one, or the file is no text.
    """
    match = re.fullmatch(r"(.+):([0-9]+):([0-9]+)", place)
    if match is None:
        raise InvalidField(f"FILE:LINE:COL must end in two numbers, got {place}")
    path, line, column = Path(match[1]), int(match[2]), int(match[3])
    data = path.read_bytes()
    encoding = "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidField(f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    lines = re.split(r"(?<=\n)", text)
    if not 1 <= line <= len(lines):
        raise InvalidField(f"{path} has {len(lines)} lines, got line {line}")
    width = len(lines[line - 1].rstrip("\r\n"))
    if not 1 <= column <= width + 1:
        raise InvalidField(f"line {line} of {path} has columns 1 to {width + 1}, got column {column}")
    at = sum(map(len, lines[: line - 1])) + column - 1
    return _Source(path, encoding, text[:at], text[at:])


def _replace(source: _Source, text: str) -> None:
    """Put a text into the gap; the file is never half written."""
    target = source.path.resolve()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.write(f"{source.prefix}{text}{source.suffix}".encode(source.encoding))
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, target.stat().st_mode)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


async def _fill(gap: Infill, settings: Settings, max_tokens: int) -> str:
    from legato.run.models import load_models
    from legato.run.plan import plan

    async with loading(next(iter(settings.models))):
        models = await load_models(settings)
    try:
        request = CompletionRequest(
            model=models.own[0].name,
            source=gap,
            sampling=SamplingOptions(temperature=0.0),
            max_tokens=max_tokens,
            output=Output(stream=True),
        )
        async with aclosing(plan(request, models.own[0]).events()) as events:
            return "".join([event.text async for event in events if isinstance(event, Delta)])
    finally:
        await models.aclose()
