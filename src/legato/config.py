"""Settings: flags over `LEGATO_*` variables over `legato.toml` over defaults.

It receives texts, files and the environment, and returns one frozen `Settings`. It is the only module that reads
`os.environ`. It starts nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import platformdirs

from legato.errors import ConfigError

__all__ = [
    "LimitSettings",
    "ModelSettings",
    "ServerSettings",
    "Settings",
    "load_settings",
    "worker_environment",
]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens and whom it answers."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    """Keys that callers may present; none: no key is asked for. In memory only their hashes are kept."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a Host header may have; none: this machine's own when listening on loopback, any otherwise."""
    insecure: bool = False
    """Listen on other addresses than loopback without keys."""

    def key_digests(self) -> tuple[bytes, ...]:
        """Return the SHA-256 of each key."""
        return tuple(hashlib.sha256(key.encode()).digest() for key in self.api_keys)


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Bounds on what one request, and all together, may take."""

    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_running: int = 64
    max_waiting: int = 256
    max_wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One served model."""

    engine: str = "llamacpp"
    """`llamacpp`, or `scripted` for a demonstration without a model."""
    path: str = ""
    """A GGUF file; empty: the pulled model of this name."""
    context_length: int = 0
    """Most tokens of prompt and answer together; 0: what the model was trained for."""
    num_cells: int = 0
    """Most tokens of all sequences in the KV cache together; 0: one full context and a little more."""
    num_threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be configured."""

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    data_dir: Path = field(default_factory=lambda: Path(platformdirs.user_data_dir("legato")))


def load_settings(file: Path | None, *, flags: Mapping[str, Any], default_model: str) -> Settings:
    """Read settings.

    Args:
        file: a TOML file; None: `legato.toml` in the working folder, if there is one.
        flags: values from the command line, nested as in the file; None: not given.
        default_model: what is served when no model is configured.

    Raises:
        ConfigError: a key is unknown or a value is not allowed; the message says which, from where, and what is
        accepted.
    """
    layers = [*_file_layer(file), *_environment_layer(os.environ), ("command line", _drop_none(flags))]
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, values in layers:
        _merge(merged, values, source, sources)
    settings: Settings = _build(Settings, merged, "", sources)
    if not settings.models:
        settings = _build(Settings, {**merged, "models": {default_model: {}}}, "", sources)
    _check(settings)
    return settings


def worker_environment() -> dict[str, str]:
    """Return the environment of an engine's worker.

    GNU OpenMP spins for a very long time by default, which collapses when a core is busy: unless the user decided, it
    spins briefly.
    """
    environment = dict(os.environ)
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "2000")
    return environment


def _file_layer(file: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    path = file or Path("legato.toml")
    if file is None and not path.exists():
        return
    try:
        yield str(path), tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None


def _environment_layer(environment: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`LEGATO_SERVER_PORT` is `server.port`; lists are separated by commas. Models and aliases are set in the file."""
    names = {
        f"LEGATO_{group.name}_{option.name}".upper(): f"{group.name}.{option.name}"
        for group in fields(Settings)
        if group.name in ("server", "limits")
        for option in fields({"server": ServerSettings, "limits": LimitSettings}[group.name])
    }
    names["LEGATO_DATA_DIR"] = "data_dir"
    for name, text in environment.items():
        if not name.startswith("LEGATO_"):
            continue
        if name not in names:
            raise ConfigError(f"environment variable `{name}` sets nothing{_hint(name, names)}")
        group, _, option = names[name].rpartition(".")
        values: dict[str, Any] = {option: _Text(text)}
        yield f"environment variable {name}", {group: values} if group else values


class _Text(str):
    """A value from the environment, still to be read as its option's type."""


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _merge(into: dict[str, Any], values: Mapping[str, Any], source: str, sources: dict[str, str], at: str = "") -> None:
    for key, value in values.items():
        path = f"{at}{key}"
        if isinstance(value, dict):
            existing = into.setdefault(key, {})
            if isinstance(existing, dict):
                _merge(existing, value, source, sources, f"{path}.")
                continue
        into[key] = value
        sources[path] = source


def _build(cls: type[Any], values: Mapping[str, Any], at: str, sources: Mapping[str, str]) -> Any:
    hints = get_type_hints(cls)
    known = {option.name: hints[option.name] for option in fields(cls)}
    arguments = {}
    for key, value in values.items():
        path = f"{at}{key}"
        if key not in known:
            source = next(
                (name for place, name in sources.items() if place == path or place.startswith(f"{path}.")), ""
            )
            raise ConfigError(f"`{path}` ({source}) is no setting{_hint(key, known)}")
        arguments[key] = _convert(known[key], value, path, sources)
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str, sources: Mapping[str, str]) -> Any:
    source = sources.get(path, "")
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"`{path}` ({source}) must be a table, got {value!r}")
        return _build(kind, value, f"{path}.", sources)  # type: ignore[arg-type]
    if getattr(kind, "__origin__", None) is Mapping or str(kind).startswith("collections.abc.Mapping"):
        item = kind.__args__[1]
        if not isinstance(value, Mapping):
            raise ConfigError(f"`{path}` ({source}) must be a table, got {value!r}")
        return {name: _convert(item, entry, f"{path}.{name}", sources) for name, entry in value.items()}
    if isinstance(value, _Text):
        value = _read_text(kind, value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"`{path}` ({source}) must be a list of texts, got {value!r}")
    if type(value) is not kind and not (kind is Path and isinstance(value, Path)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
        raise ConfigError(f"`{path}` ({source}) must be {names[kind]}, got {str(value)!r}")
    return value


def _read_text(kind: Any, text: str) -> Any:
    plain = str(text)
    try:
        if kind is int:
            return int(plain)
        if kind is float:
            return float(plain)
    except ValueError:
        return plain
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(plain.lower(), plain)
    if kind == tuple[str, ...]:
        return [item.strip() for item in plain.split(",") if item.strip()]
    return plain


def _hint(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(sorted(known))}"


def _check(settings: Settings) -> None:
    server, limits = settings.server, settings.limits
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"`server.port` must be between 0 and 65535, got {server.port}")
    for option in fields(limits):
        if getattr(limits, option.name) <= 0:
            raise ConfigError(f"`limits.{option.name}` must be above 0, got {getattr(limits, option.name)}")
    if any(not key for key in server.api_keys):
        raise ConfigError("`server.api_keys` has an empty key")
    if not is_loopback(server.host) and not server.api_keys and not server.insecure:
        raise ConfigError(
            f"`server.host` is {server.host}, which others can reach, and no `server.api_keys` are set; "
            "set keys, or use `--insecure` if everyone may use this server"
        )
    for name, model in settings.models.items():
        if model.engine not in ("llamacpp", "scripted"):
            raise ConfigError(f"`models.{name}.engine` must be `llamacpp` or `scripted`, got {model.engine!r}")
        if model.context_length < 0 or model.num_cells < 0 or model.num_threads < 1:
            raise ConfigError(f"`models.{name}`: lengths must not be negative, and `num_threads` must be at least 1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
