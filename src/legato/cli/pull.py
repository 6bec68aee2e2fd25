"""`legato pull`"""

from __future__ import annotations

from pathlib import Path

import click

from legato.catalog.pull import default_model, find_entry
from legato.cli.options import config_option, pull_with_bar, settings_for

__all__ = ["command"]


@click.command("pull")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@config_option
def command(names: tuple[str, ...], config_file: Path | None) -> None:
    """Download models by name; the default model if none is named."""
    settings = settings_for(config_file, None)
    entries = [find_entry(name) for name in names or (default_model(),)]
    for entry in entries:
        click.echo(pull_with_bar(entry, settings.data_dir))
