"""Settings: flags over `LEGATO_*` variables over `legato.toml` over defaults.

It receives texts, files and the environment, and returns one frozen `Settings`. It is the only module that reads
`os.environ`. It starts nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import platformdirs

from legato.errors import ConfigError
from legato.system.machine import cores
from legato.system.service_links import is_service_link

__all__ = [
    "LimitSettings",
    "ModelSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "check_exposure",
    "child_environment",
    "is_loopback",
    "load_settings",
    "read_key",
    "worker_environment",
]


def _number(default: float, *, least: float, most: float = float("inf")) -> Any:
    """Declare an option that is a number within bounds."""
    return field(default=default, metadata={"least": least, "most": most})


_PATH = {"is_path": True}
"""Marks an option that is a path. A `~` at its beginning is a home folder."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens and whom it answers."""

    host: str = "127.0.0.1"
    port: int = _number(8080, least=0, most=65535)
    api_keys: tuple[str, ...] = ()
    """Keys that callers may present, or `sha256:` and the hash of one in hex; none: no key is asked for. In memory only
    hashes are kept.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Names that a Host header may have; none: this machine's own when listening on loopback, any otherwise."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers, such as `https://example.org`; `*`: any; none: this server's own alone."""
    log_format: str = field(default="text", metadata={"choices": ("text", "json")})
    """How a line of the log is written: `text` or `json`."""
    traces_url: str = ""
    """Where traces of requests are sent, as `http://localhost:4318/v1/traces`; empty: nowhere."""
    insecure: bool = False
    """Listen on other addresses than loopback without keys."""

    def __post_init__(self) -> None:
        """Forget the keys themselves.

        Raises:
            ConfigError: one is empty, or is no hash though it begins like one.
        """
        object.__setattr__(self, "api_keys", tuple(_hashed(key) for key in self.api_keys))

    def key_digests(self) -> tuple[bytes, ...]:
        """Return the SHA-256 of each key."""
        return tuple(bytes.fromhex(key.removeprefix(_HASHED)) for key in self.api_keys)


_HASHED = "sha256:"


def _hashed(key: str) -> str:
    """Return a key's hash as it may stand in the settings; of a hash, itself."""
    if not key:
        raise ConfigError("`server.api_keys` has an empty key")
    if not key.startswith(_HASHED):
        return _HASHED + hashlib.sha256(key.encode()).hexdigest()
    digits = key.removeprefix(_HASHED)
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ConfigError(
            f"`server.api_keys` must have 64 of 0-9 and a-f after `{_HASHED}`, got {len(digits)} characters"
        )
    return key


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Bounds on what one request, and all together, may take."""

    max_body_bytes: int = _number(8 * 1024 * 1024, least=1)
    head_timeout_s: float = _number(10.0, least=0.001)
    """Seconds within which a request's headers must arrive."""
    body_timeout_s: float = _number(30.0, least=0.001)
    write_timeout_s: float = _number(60.0, least=0.001)
    idle_timeout_s: float = _number(75.0, least=0.001)
    """Seconds that a connection is kept for another request."""
    max_connections: int = _number(0, least=0)
    """Most connections at a time; 0: as many as open files allow (`ulimit -n`, less a quarter), at most 4096."""
    max_running: int = _number(64, least=1)
    max_waiting: int = _number(256, least=1)
    max_wait_s: float = _number(60.0, least=0.001)
    grace_s: int = _number(5, least=0)
    """Seconds that running requests have to end when the server is told to stop."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One served model."""

    engine: str = field(default="llamacpp", metadata={"choices": ("llamacpp", "scripted", "upstream")})
    """`llamacpp`; `upstream` for a model on other servers; `scripted` for a demonstration without a model."""
    path: str = field(default="", metadata=_PATH)
    """A GGUF file; empty: the pulled model of this name."""
    context_length: int = _number(0, least=0, most=2**31 - 1)
    """Most tokens of prompt and answer together; 0: what the model was trained for."""
    num_cells: int = _number(0, least=0, most=2**31 - 1)
    """Most tokens of all sequences in the KV cache together; 0: one full context and a little more."""
    num_threads: int = field(default_factory=lambda: cores().num, metadata={"least": 1, "most": 512})
    """Threads that compute."""
    spill_bytes: int = _number(512 * 1024 * 1024, least=0)
    """Most bytes of idle prompts and answers that had to leave the KV cache and can be read back."""
    spill_dir: str = field(default="", metadata=_PATH)
    """A folder where these are kept, also over a restart; empty: in memory."""
    urls: tuple[str, ...] = ()
    """Where the engine `upstream` finds its model: servers with OpenAI's completions, such as vLLM. They are asked
    directly: proxies that the environment names are not.
    """
    upstream_model: str = ""
    """What the model is called there; empty: the first one that a server lists."""
    upstream_key: str = ""
    """Sent there as a bearer token; empty: none."""
    upstream_plugin: bool = False
    """Whether these servers are vLLM with Legato's plug-in: sampling is then as exact as the embedded engine's."""
    tokenizer: str = field(default="", metadata=_PATH)
    """A folder with the model's `tokenizer.json`, `tokenizer_config.json` and `config.json`, for `upstream`."""
    reasoning_open: str = ""
    """What the model writes before it thinks; empty: what its chat template says."""
    reasoning_close: str = ""
    """What it writes when it has thought; given together with `reasoning_open`."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where keys, usage and journals are kept, and how long."""

    url: str = field(default="", metadata=_PATH)
    """A database, as `postgresql://user:password@host/name`; empty: `legato.db` in the data folder, with SQLite."""
    resume_window_s: float = _number(300.0, least=0)
    """Seconds that a resumable answer goes on without a client."""
    retention_s: float = _number(86400.0, least=0)
    """Seconds after which the journal of an answer that is over is removed."""
    journal_bytes: int = _number(1024 * 1024 * 1024, least=0)
    """Most bytes of all journals; the oldest that are over go first."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be configured."""

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    store: StoreSettings = StoreSettings()
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    data_dir: Path = field(default_factory=lambda: _default_data_dir(), metadata=_PATH)


def _default_data_dir() -> Path:
    """Return the user's own folder for data.

    Raises:
        ConfigError: the user has none, as in a container that runs under any number.
    """
    with suppress(RuntimeError):
        folder = Path(platformdirs.user_data_dir("legato"))
        if folder.is_absolute():
            return folder
    raise ConfigError(
        f"`data_dir` must be set, as `LEGATO_DATA_DIR=/path`: HOME is not, and user {os.getuid()} has no home folder"
    )


def load_settings(
    file: Path | None, *, flags: Mapping[str, Any], default_model: str, only_model: str | None = None
) -> Settings:
    """Read settings.

    Args:
        file: a TOML file; None: `legato.toml` in the working folder, if there is one.
        flags: values from the command line, nested as in the file; None: not given.
        default_model: what is served when no model is configured.
        only_model: serve this one instead of those configured: a name, an alias or a GGUF file.

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
    if only_model is not None:
        settings = _narrow(settings, only_model)
    elif not settings.models:
        settings = replace(settings, models={default_model: ModelSettings()})
    _check(settings)
    return settings


def read_key(variable: str) -> str | None:
    """Return the key of a provider from the environment variable that has it; None: it is not set."""
    return os.environ.get(variable) or None


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a process that Legato starts: its own, and `extra`."""
    return {**os.environ, **extra}


def worker_environment() -> dict[str, str]:
    """Return the environment of an engine's worker.

    GNU OpenMP spins for a very long time by default, which collapses when a core is busy: unless the user decided, it
    spins briefly.
    """
    is_decided = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    return child_environment() if is_decided else child_environment(GOMP_SPINCOUNT="2000")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def check_exposure(server: ServerSettings, *, has_keys: bool) -> None:
    """Refuse to let others in without keys. `has_keys`: whether there are some beside those configured.

    Raises:
        ConfigError: others can reach the address, and nothing says that they may.
    """
    if not is_loopback(server.host) and not server.api_keys and not has_keys and not server.insecure:
        raise ConfigError(
            f"`server.host` is {server.host}, which others can reach, and there are no keys; make one with "
            "`legato keys create`, set `server.api_keys`, or use `--insecure` if everyone may use this server"
        )


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
    places = [
        (group, option.name)
        for group, kind in (("server", ServerSettings), ("limits", LimitSettings), ("store", StoreSettings))
        for option in fields(kind)
    ]
    names = {f"LEGATO_{group}_{option}".upper(): (group, option) for group, option in places}
    names["LEGATO_DATA_DIR"] = ("", "data_dir")
    for name, text in environment.items():
        if not name.startswith("LEGATO_") or is_service_link(name, text):
            continue
        if name not in names:
            raise ConfigError(f"environment variable `{name}` sets nothing{_hint(name, names)}")
        group, option = names[name]
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
    """Lay values over others. `sources` gets where each comes from, by its path; a table's own source is its last."""
    for key, value in values.items():
        path = f"{at}{key}"
        sources[path] = source
        if isinstance(value, dict) and isinstance(into.setdefault(key, {}), dict):
            _merge(into[key], value, source, sources, f"{path}.")
        else:
            into[key] = value


def _build(cls: type[Any], values: Mapping[str, Any], at: str, sources: Mapping[str, str]) -> Any:
    kinds = get_type_hints(cls)
    options = {option.name: option for option in fields(cls)}
    arguments = {}
    for key, value in values.items():
        path = f"{at}{key}"
        place = f"`{path}` ({sources[path]})"
        if key not in options:
            dots = "; a name with dots needs quotes" if cls is ModelSettings and isinstance(value, Mapping) else ""
            raise ConfigError(f"{place} is no setting{_hint(key, options)}{dots}")
        arguments[key] = _convert(kinds[key], value, path, sources)
        if "is_path" in options[key].metadata:
            arguments[key] = kinds[key](_expand(str(arguments[key]), place))
        _check_value(arguments[key], place, options[key].metadata)
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str, sources: Mapping[str, str]) -> Any:
    """Return the value as its option's type; a table is built from its own options or entries."""
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"`{path}` ({sources[path]}) must be a table, got {value!r}")
        if isinstance(kind, type) and is_dataclass(kind):
            return _build(kind, value, f"{path}.", sources)
        item = get_args(kind)[1]
        return {name: _convert(item, entry, f"{path}.{name}", sources) for name, entry in value.items()}
    if isinstance(value, _Text):
        value = _read_text(kind, str(value))
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is not kind:
        shown = "***" if path in ("server.api_keys", "store.url") else repr(value)
        raise ConfigError(f"`{path}` ({sources[path]}) must be {_ACCEPTED[kind]}, got {shown}")
    return value


_SQLITE = "sqlite:///"


def _expand(path: str, place: str) -> str:
    """Return a path, or the address of a database file, with the home folder in place of `~`.

    Raises:
        ConfigError: there is no such folder, or it is no path.
    """
    if "://" in path and not path.startswith(_SQLITE):
        return path
    scheme = _SQLITE if path.startswith(_SQLITE) else ""
    path = path.removeprefix(scheme)
    if "\0" in path:
        raise ConfigError(f"{place} must be a path, got {path!r}")
    try:
        return scheme + (str(Path(path).expanduser()) if path.startswith("~") else path)
    except RuntimeError:
        raise ConfigError(f"{place} must be a path, got {path!r}, and there is no such home folder") from None


_ACCEPTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a list of texts",
}


def _read_text(kind: Any, text: str) -> Any:
    """Return what a text from the environment stands for; the text itself if it is nothing of that kind."""
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind == tuple[str, ...]:
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def _check_value(value: Any, place: str, allowed: Mapping[str, Any]) -> None:
    if "choices" in allowed and value not in allowed["choices"]:
        choices = " or ".join(f"`{choice}`" for choice in allowed["choices"])
        raise ConfigError(f"{place} must be {choices}, got {value!r}")
    if "least" in allowed and not allowed["least"] <= value <= allowed["most"]:
        bounds = f"at least {allowed['least']}"
        if allowed["most"] != float("inf"):
            bounds = f"between {allowed['least']} and {allowed['most']}"
        raise ConfigError(f"{place} must be {bounds}, got {value}")


def _hint(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"


def _narrow(settings: Settings, model: str) -> Settings:
    """Serve one model alone, as it is configured if it is; a file is served under its own name."""
    is_file = model.endswith(".gguf") or "/" in model
    name = Path(model).stem if is_file else settings.aliases.get(model, model)
    chosen = settings.models.get(name, ModelSettings())
    return replace(
        settings,
        models={name: replace(chosen, path=_expand(model, "`--model`")) if is_file else chosen},
        aliases={alias: target for alias, target in settings.aliases.items() if target == name},
    )


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers write it: in small letters. Also those of extensions and desktop shells."""

_SERVER = re.compile(r'https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[!"$->@-~]*)?')
"""Where a server is: no query, and no name and password, which `upstream_key` is for."""


def _check(settings: Settings) -> None:
    """Refuse what only shows when settings are seen together."""
    for origin in settings.server.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"`server.cors_origins` must have origins as browsers send them, `https://example.org` or "
                f"`http://localhost:3000` with nothing after it, or `*`, got {origin!r}"
            )
    for name, model in settings.models.items():
        for option in ("urls", "tokenizer", "upstream_model", "upstream_key", "upstream_plugin"):
            is_given, is_upstream = bool(getattr(model, option)), model.engine == "upstream"
            if is_given and not is_upstream:
                raise ConfigError(f'`models.{name}.{option}` needs `models.{name}.engine` to be "upstream"')
            if is_upstream and not is_given and option in ("urls", "tokenizer"):
                raise ConfigError(f'`models.{name}.engine` "upstream" needs `models.{name}.{option}`')
        for url in model.urls:
            if not _SERVER.fullmatch(url):
                shown = re.sub("//.*@", "//...@", url)  # There may be a password.
                raise ConfigError(
                    f"`models.{name}.urls` must have addresses such as `http://gpu-1:8000`, got {shown!r}"
                )
        if not (model.upstream_key.isascii() and model.upstream_key.isprintable()):
            raise ConfigError(f"`models.{name}.upstream_key` must be ASCII without control characters")
        if bool(model.reasoning_open) != bool(model.reasoning_close):
            given, missing = ("open", "close") if model.reasoning_open else ("close", "open")
            raise ConfigError(f"`models.{name}.reasoning_{given}` needs `models.{name}.reasoning_{missing}` beside it")
    for alias, name in settings.aliases.items():
        if name not in settings.models:
            served = ", ".join(f"`{name}`" for name in settings.models)
            raise ConfigError(f"`aliases.{alias}` names model `{name}`, which is not served; served: {served}")
