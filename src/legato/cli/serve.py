"""`legato serve`"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from legato.cli.options import config_option, ensure_pulled, model_option, open_store, settings_for
from legato.config import check_exposure
from legato.logs import set_up_logs

__all__ = ["command"]


@click.command("serve")
@config_option
@model_option
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0 takes a free one.  [default: 8080]")
@click.option("--demo", is_flag=True, help="Serve a scripted engine, without any model.")
@click.option("--insecure", is_flag=True, help="Listen on any address without keys.")
@click.option("--verbose", is_flag=True, help="Log every request: id, path, status and time, never text.")
def command(
    config_file: Path | None,
    model: str | None,
    host: str | None,
    port: int | None,
    demo: bool,
    insecure: bool,
    verbose: bool,
) -> None:
    """Serve the HTTP API until interrupted. The model is pulled if it is not here yet."""
    if demo and model is not None:
        raise click.UsageError("--demo serves no model; leave out --model.")
    flags: dict[str, Any] = {"server": {"host": host, "port": port, "insecure": insecure or None}}
    if demo:
        model = "demo"
        flags["models"] = {model: {"engine": "scripted"}}
    settings = settings_for(config_file, model, flags)
    say = set_up_logs(settings.server.log_format, verbose=verbose)
    with open_store(settings) as store:
        check_exposure(settings.server, has_keys=store.has_keys())
        ensure_pulled(settings)
        from legato.server.run import serve  # Takes a while to load; what is wrong above is said at once.
        from legato.server.site import FOLDER

        names = ", ".join(settings.models)

        def ready(url: str) -> None:
            say(f"Legato serves {names} at {url}/v1")
            if sys.stderr.isatty() and (FOLDER / "index.html").is_file():  # For a reader; what reads a log needs none.
                say(f"The documentation is at {url}/docs/")

        asyncio.run(serve(settings, store, ready=ready))
