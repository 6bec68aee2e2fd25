"""`legato models`"""

from __future__ import annotations

from pathlib import Path

import click

from legato.catalog.pull import catalog, is_pulled
from legato.cli.options import config_option, settings_for

__all__ = ["command"]


@click.command("models")
@config_option
def command(config_file: Path | None) -> None:
    """List the models that can be pulled, and which are here."""
    settings = settings_for(config_file, None)
    for name, entry in catalog().items():
        state = "here" if is_pulled(entry, settings.data_dir) else "not pulled"
        default = " (default)" if entry.is_default else ""
        click.echo(
            f"{name}{default}\n  {entry.description}\n  {entry.size_bytes / 1e6:.0f} MB, {entry.licence}, {state}"
        )
    for name, model in settings.models.items():
        if model.path:
            state = "here" if Path(model.path).exists() else "missing"
            click.echo(f"{name}\n  {model.path}, {state}")
