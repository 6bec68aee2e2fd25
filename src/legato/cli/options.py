"""Options that several commands share, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from legato.config import Settings, load_settings
from legato.errors import ConfigError
from legato.pull import catalog, default_model, is_pulled, pull

__all__ = ["config_option", "ensure_pulled", "model_flags", "model_option", "pull_with_bar", "settings_for"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def config_option(command: _Command) -> _Command:
    """Add `--config`."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="Settings file.  [default: legato.toml, if there is one]",
    )(command)


def model_option(command: _Command) -> _Command:
    """Add `--model`."""
    return click.option(
        "--model", help=f"Model name, or a GGUF file.  [default: {default_model()}, or what the settings file serves]"
    )(command)


def model_flags(model: str | None) -> dict[str, Any]:
    """Return the settings that `--model` stands for: a catalogue name, or a file served under its own name."""
    if model is None:
        return {}
    if model.endswith(".gguf") or "/" in model:
        return {"models": {Path(model).stem: {"path": model}}}
    return {"models": {model: {}}}


def settings_for(config_file: Path | None, model: str | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read settings for a command; a `--model` narrows them to that model."""
    settings = load_settings(config_file, flags={**(flags or {}), **model_flags(model)}, default_model=default_model())
    if model is None:
        return settings
    name = next(iter(model_flags(model)["models"]))
    aliased = settings.aliases.get(name, name)
    chosen = aliased if aliased in settings.models else name
    kept = {chosen: settings.models[chosen]}
    aliases = {alias: target for alias, target in settings.aliases.items() if target in kept}
    return Settings(settings.server, settings.limits, kept, aliases, settings.data_dir)


def ensure_pulled(settings: Settings) -> None:
    """Pull every served model of the catalogue that is not here yet."""
    entries = catalog()
    for name, model in settings.models.items():
        if model.engine != "llamacpp" or model.path:
            continue
        if name not in entries:
            known = ", ".join(f"`{known}`" for known in entries)
            raise ConfigError(
                f"model `{name}` is not in the catalogue and has no `path`; known: {known}; or give a GGUF file"
            )
        if not is_pulled(entries[name], settings.data_dir):
            pull_with_bar(name, settings.data_dir)


def pull_with_bar(name: str, data_dir: Path) -> Path:
    """Pull a model, with a progress bar on standard error."""
    entry = catalog()[name]
    progress: Any = click.progressbar(
        length=entry.size_bytes,
        label=f"Pulling {name} ({entry.size_bytes / 1e6:.0f} MB)",
        file=click.get_text_stream("stderr"),
    )
    with progress as bar:
        return pull(entry, data_dir, progress=bar.update)
