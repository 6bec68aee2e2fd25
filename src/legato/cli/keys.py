"""`legato keys`"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from legato.cli import Group, say
from legato.cli.options import config_option, open_store, settings_for

__all__ = ["command"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_LIMIT = click.IntRange(min=1, max=2**53)


class _Expiry(click.ParamType[int]):
    """A day, or so many days from now."""

    name = "day"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return seconds since 1970: a day's first moment, in UTC."""
        if days := re.fullmatch(r"(\d{1,5})d", value):
            return int(time.time()) + 86400 * int(days[1])
        try:
            return int(datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
        except ValueError:
            self.fail(f"{value!r} is no day as 2030-12-31, nor a number of days as 90d", param, ctx)


@click.group("keys", cls=Group)
def command() -> None:
    """Manage the keys of those who may use the server."""


def _limits(command: _Command) -> _Command:
    for what, period in (("tokens", "month"), ("tokens", "minute"), ("requests", "minute")):
        words = f"{what.capitalize()} that it may take in a {period}."
        command = click.option(f"--{what}-per-{period}", type=_LIMIT, help=words)(command)
    return command


@command.command("create")
@config_option
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model that it may use; can be repeated.  [default: all]")
@_limits
@click.option("--no-control-tokens", is_flag=True, help="Refuse raw prompts with control tokens.")
@click.option("--admin", is_flag=True, help="Let it manage keys, and see everybody's usage and the metrics.")
@click.option("--expires", "expires_at", type=_Expiry(), help="Day on which it ends (2030-12-31), or in days (90d).")
def create(config_file: Path | None, models: tuple[str, ...], no_control_tokens: bool, **rights: Any) -> None:
    """Make a key for NAME and print it. It is shown now and never again."""
    from legato.storage.keys import Key

    settings = settings_for(config_file, None)
    served = [*settings.models, *settings.aliases]
    if unknown := [model for model in models if model not in served]:
        say(f"no model is served here as {', '.join(unknown)}, only {', '.join(served)}; the key is made all the same")
    with open_store(settings) as store:
        click.echo(store.create_key(Key(models=models, control_tokens=not no_control_tokens, **rights)))


@command.command("list")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_keys(config_file: Path | None, as_json: bool) -> None:
    """List all keys, also revoked ones."""
    with open_store(settings_for(config_file, None)) as store:
        keys = store.keys()
    if as_json:
        click.echo(json.dumps([asdict(key) for key in keys], indent=2))
        return
    if not keys:
        click.echo("no keys")
    for key in keys:
        rights = [
            "revoked" if key.revoked_at is not None else "",
            f"expires {_day(key.expires_at)}" if key.expires_at is not None else "",
            f"models {', '.join(key.models)}" if key.models else "",
            *(
                f"{limit} {name.replace('_', ' ')}"
                for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_month")
                if (limit := getattr(key, name)) is not None
            ),
            "" if key.control_tokens else "no control tokens",
            "admin" if key.admin else "",
        ]
        said = "".join(f", {right}" for right in rights if right)
        click.echo(f"{key.name}\n  {key.prefix}..., created {_day(key.created_at)}{said}")


@command.command("revoke")
@config_option
@click.argument("name")
def revoke(config_file: Path | None, name: str) -> None:
    """Take the rights of NAME's key away for good."""
    with open_store(settings_for(config_file, None)) as store:
        store.revoke_key(name)


@command.command("rotate")
@config_option
@click.argument("name")
def rotate(config_file: Path | None, name: str) -> None:
    """Print a new key for NAME, with the same rights. The old one is wrong from now on."""
    with open_store(settings_for(config_file, None)) as store:
        click.echo(store.rotate_key(name))


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
