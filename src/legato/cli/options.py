"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from legato.catalog.pull import CatalogEntry, default_model, find_entry, find_model, is_pulled, pull
from legato.cli.terminal import Estimate
from legato.config import Settings, load_settings
from legato.errors import ConfigError, InvalidField
from legato.system.permissions import protect_folder

if TYPE_CHECKING:
    from legato.storage.store import Store

__all__ = ["config_option", "decode", "ensure_pulled", "model_option", "open_store", "pull_with_bar", "settings_for"]

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


def decode(data: bytes, source: str) -> str:
    """Return the text of a file or of what was typed.

    Raises:
        InvalidField: it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"{source} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def settings_for(config_file: Path | None, model: str | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read settings for a command; a `--model` narrows them to that model."""
    return load_settings(config_file, flags=flags or {}, default_model=default_model(), only_model=model)


def open_store(settings: Settings) -> AbstractContextManager[Store]:
    """Open the configured database; leaving the context closes it.

    Raises:
        ConfigError: it cannot be used, or the data folder that it is in.
    """
    from legato.storage.database import store_url  # Takes a while to load, and few commands want it.
    from legato.storage.store import Store

    if not settings.store.url:
        try:
            protect_folder(settings.data_dir)
        except OSError as error:
            raise ConfigError(f"`data_dir` {settings.data_dir} cannot be used: {error.strerror}") from None
    return closing(Store.open(store_url(settings)))


def ensure_pulled(settings: Settings) -> None:
    """Pull every served model of the catalogue that is not here yet."""
    for name, model in settings.models.items():
        if model.engine == "llamacpp" and not model.path:
            pull_with_bar(find_entry(name), settings.data_dir)


def pull_with_bar(entry: CatalogEntry, data_dir: Path) -> Path:
    """Pull a model, unless it is here, with a progress bar on standard error."""
    if is_pulled(entry, data_dir):
        return find_model(entry.name, data_dir)
    label = f"Pulling {entry.name} ({entry.size_bytes / 1e6:.0f} MB)"
    estimate = Estimate(entry.size_bytes)
    with click.progressbar(
        length=entry.size_bytes, label=label, file=sys.stderr, show_eta=False, item_show_func=lambda told: told
    ) as bar:
        return pull(
            entry,
            data_dir,
            progress=lambda position: bar.update(max(0, position - bar.pos), estimate.tell(position)),
        )
