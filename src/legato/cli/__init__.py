"""The `legato` command: one module per subcommand, each imported when it is used.

Every failure that the user can act on is one line on standard error: exit code 2 for what was asked, 1 for what went
wrong, 130 after Ctrl-C. A reader that went away (`| head`) is no failure.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from contextlib import suppress
from typing import Any

import click

from legato import __version__
from legato.errors import ConfigError, LegatoError, RequestError, StoreUnavailable
from legato.logs import escape

__all__ = ["Group", "group", "main", "say"]

_COMMANDS = ("chat", "complete", "doctor", "infill", "keys", "models", "pull", "serve", "usage", "write")


class Group(click.Group):
    """Commands. A misspelt one is answered with the one that is probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See `click.Group`."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not (close := difflib.get_close_matches(args[0], self.list_commands(ctx), 1)):
                raise
            message = f"No such command '{args[0]}'; did you mean '{close[0]}'?"
            raise click.UsageError(message, error.ctx) from None


class _Commands(Group):
    """Loads a subcommand's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"legato.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # Here, because further out click makes it exit code 1.
            _leave(0)
        return result


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="legato")
def group() -> None:
    """Continue text so that the join cannot be seen."""


def main() -> None:
    """Run the command line, and turn every expected failure into one line and an exit code."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - None if the descriptor is closed
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - else a file gets its number
    for stream in (sys.stdout, sys.stderr):  # Text is UTF-8 whatever the locale says.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        group.main(standalone_mode=False)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        _leave(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _leave(130)
    except (ConfigError, RequestError) as error:
        say(error.message)
        _leave(2)
    except StoreUnavailable as error:
        say(f"the database cannot be used: {error.reason}")
        _leave(1)
    except LegatoError as error:
        say(error.message)
        _leave(1)
    except OSError as error:
        say(str(error))
        _leave(1)


def say(message: str) -> None:
    """Say something in one line on standard error."""
    with suppress(OSError):
        click.echo(f"legato: {escape(' '.join(message.split()))}", err=True)


def _leave(code: int) -> None:
    """Exit; what is still buffered and cannot be written is given up quietly."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
