"""`legato pull`"""

from __future__ import annotations

from pathlib import Path

import click

from legato.cli.options import config_option, pull_with_bar, settings_for
from legato.errors import ConfigError
from legato.pull import catalog, default_model

__all__ = ["command"]


@click.command("pull")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@config_option
def command(names: tuple[str, ...], config_file: Path | None) -> None:
    """Download models by name; the default model if none is named."""
    settings = settings_for(config_file, None)
    for name in names or (default_model(),):
        if name not in catalog():
            known = ", ".join(f"`{known}`" for known in catalog())
            raise ConfigError(f"model `{name}` is not in the catalogue; known: {known}")
        path = pull_with_bar(name, settings.data_dir)
        click.echo(path)
