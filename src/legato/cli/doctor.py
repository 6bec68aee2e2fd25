"""`legato doctor`"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from legato.cli.options import config_option, model_option, settings_for
from legato.config import Settings
from legato.engines.llamacpp import matmul
from legato.errors import ConfigError, LegatoError
from legato.system.machine import cores

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
    yield True, f"Python {platform.python_version()} on {platform.machine()}, {cores()}"
    is_installed = importlib.util.find_spec("llama_cpp") is not None
    if is_installed:
        version = importlib.metadata.version("llama-cpp-python")
        yield True, f"llama-cpp-python {version}, {'with' if matmul.is_loaded else 'without'} Legato's own products"
    elif any(model.engine == "llamacpp" for model in settings.models.values()):
        yield False, "llama-cpp-python is not installed: `pip install 'legato[local]'`"
    for name, model in settings.models.items():
        if is_installed or model.engine != "llamacpp":
            yield _model(settings, name)
    yield _port(settings)


def _model(settings: Settings, name: str) -> tuple[bool, str]:
    """Start the engine and write a few tokens."""
    try:
        return True, asyncio.run(_try(settings, name))
    except LegatoError as error:
        return False, error.message


async def _try(settings: Settings, name: str) -> str:
    from legato.run.answers import collect
    from legato.run.models import load_models
    from legato.run.plan import plan
    from legato.types import CompletionRequest, SamplingOptions, Text

    only = replace(settings, models={name: settings.models[name]}, aliases={})
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
    from legato.server.run import listen, max_connections

    try:
        num = max_connections(settings.limits)
    except ConfigError as error:
        return False, error.message
    try:
        listen(settings.server).close()
    except ConfigError as error:
        return False, f"{error.message}; choose another with `--port`"
    return True, f"{settings.server.host} port {settings.server.port} is free, for at most {num} connections"
