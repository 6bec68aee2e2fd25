"""`legato doctor`"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from legato.cli.options import config_option, model_option, settings_for
from legato.config import Settings
from legato.errors import ConfigError
from legato.pull import catalog, is_pulled

__all__ = ["command"]


@click.command("doctor")
@config_option
@model_option
def command(config_file: Path | None, model: str | None) -> None:
    """Check what works on this machine, and say what to do where something does not.

    The exit code is 1 if anything that `legato serve` needs is missing.
    """
    settings = settings_for(config_file, model)
    is_well = True
    for good, line in _checks(settings):
        click.echo(f"{'ok  ' if good else 'FAIL'} {line}")
        is_well = is_well and good
    sys.exit(0 if is_well else 1)


def _checks(settings: Settings) -> Iterator[tuple[bool, str]]:
    yield True, f"Python {platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    try:
        yield True, f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        yield False, "llama-cpp-python is not installed: `pip install 'legato[local]'`"
        return
    for name, model in settings.models.items():
        entry = catalog().get(name)
        if not model.path and entry is not None and not is_pulled(entry, settings.data_dir):
            yield False, f"model {name} is not here: `legato pull {name}`"
            continue
        yield _engine(settings, name)
    yield _port(settings)


def _engine(settings: Settings, name: str) -> tuple[bool, str]:
    """Start the engine and write a few tokens."""
    try:
        return True, asyncio.run(_try(settings, name))
    except ConfigError as error:
        return False, error.message


async def _try(settings: Settings, name: str) -> str:
    from legato.models import load_models
    from legato.pipeline import collect, plan
    from legato.types import CompletionRequest, SamplingOptions, Text

    only = Settings(settings.server, settings.limits, {name: settings.models[name]}, {}, settings.data_dir)
    started = time.perf_counter()
    models = await load_models(only)
    try:
        loaded = time.perf_counter()
        request = CompletionRequest(name, Text(("One, two, three,",)), SamplingOptions(temperature=0.0), max_tokens=16)
        (answer,) = await collect(plan(request, models.own[0]).events())
        rate = answer.usage.completion_tokens / (time.perf_counter() - loaded)
    finally:
        await models.aclose()
    return f"model {name} loads in {loaded - started:.1f} s and writes {rate:.0f} tokens/s"


def _port(settings: Settings) -> tuple[bool, str]:
    host, port = settings.server.host, settings.server.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return False, f"cannot listen on {host} port {port}: {error.strerror}; choose another with `--port`"
    return True, f"{host} port {port} is free"
