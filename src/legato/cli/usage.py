"""`legato usage`"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

import click

from legato.cli.options import config_option, open_store, settings_for

__all__ = ["command"]

_DAY = click.DateTime(["%Y-%m-%d"])


@click.command("usage")
@config_option
@click.option("--since", type=_DAY, help="First day, in UTC.  [default: the first there is]")
@click.option("--until", type=_DAY, help="Last day.  [default: the last there is]")
@click.option("--key", help="Show this key alone.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
def command(
    config_file: Path | None, since: datetime | None, until: datetime | None, key: str | None, form: str
) -> None:
    """Show how many requests and tokens each key took of each model on each day."""
    from legato.storage.usage import UsageRow

    with open_store(settings_for(config_file, None)) as store:
        bounds = {name: f"{day:%Y-%m-%d}" for name, day in (("since", since), ("until", until)) if day is not None}
        rows = [row for row in store.usage(**bounds) if key in (None, row.key)]
    names = [option.name for option in fields(UsageRow)]
    values = [[str(value) for value in asdict(row).values()] for row in rows]
    if form == "json":
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *values])
    else:
        _print_table([[name.replace("_", " ") for name in names], *values])


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print texts to the left and counts to the right; without a key there is no name."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            (text or "-").ljust(width) if at < 3 else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
