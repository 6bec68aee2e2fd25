"""Sequences that had to leave the KV cache: kept in host memory, or as files that outlive the process.

It stores states (bytes, as `binding.Model.save` gives them) by their tokens, up to a number of bytes, and gives up the
least recently used. A file is only trusted if its checksum holds and it was written for the same model by the same
version of llama.cpp, so that a state is never read as something else.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from legato.engines.llamacpp.cache import Tokens, shared_head
from legato.system.permissions import open_private, protect_file, protect_folder

__all__ = ["Spill"]

_SUFFIX = ".kv"


@dataclass(slots=True)
class _Entry:
    tokens: Tokens
    namespace: str
    size: int
    state: bytes | None
    """None: it is in the entry's file."""


class Spill:
    """States of idle sequences."""

    def __init__(self, max_bytes: int, directory: Path | None, fingerprint: str) -> None:
        """Open a store.

        Args:
            max_bytes: most bytes of all states together; 0 keeps nothing.
            directory: where to keep them, read at once; None: in memory.
            fingerprint: names the model and the format of its states.
        """
        self.max_bytes = max_bytes
        self._directory = directory
        self._fingerprint = fingerprint
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0
        if directory is not None and max_bytes:
            protect_folder(directory)
            for name, entry in self._read_directory(directory):
                self._entries[name] = entry
                self._num_bytes += entry.size
            self._shrink()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_kept(self) -> bool:
        """Whether what is stored outlives the process."""
        return self._directory is not None and self.max_bytes > 0

    def longest(self, tokens: Tokens, namespace: str) -> tuple[str, int]:
        """Return the entry with the longest common head, and that head's length; ("", 0): none shares any."""
        best, length = "", 0
        for name, entry in self._entries.items():
            if entry.namespace == namespace and (shared := shared_head(entry.tokens, tokens)) > length:
                best, length = name, shared
        return best, length

    def put(self, tokens: Tokens, namespace: str, state: bytes) -> None:
        """Store a state, in place of states of its heads. What is too large or cannot be written is not stored."""
        name = self._name(tokens, namespace)
        if name in self._entries:
            self._entries.move_to_end(name)
            return
        if len(state) > self.max_bytes:
            return
        for other, entry in list(self._entries.items()):
            if entry.namespace == namespace and shared_head(entry.tokens, tokens) == entry.tokens.size:
                self._drop(other)
        if self._directory is not None:
            try:
                self._write(self._directory / name, tokens, namespace, state)
            except OSError:
                return
        self._entries[name] = _Entry(tokens, namespace, len(state), None if self._directory is not None else state)
        self._num_bytes += len(state)
        self._shrink()

    def get(self, name: str) -> bytes | None:
        """Return a state. None: its file is gone or damaged, and the entry is no longer there."""
        entry = self._entries[name]
        self._entries.move_to_end(name)
        if entry.state is not None:
            return entry.state
        assert self._directory is not None
        path = self._directory / name
        with suppress(OSError, ValueError):
            with path.open("rb") as file:
                header = json.loads(file.readline())
                file.seek(entry.tokens.nbytes, os.SEEK_CUR)
                state = file.read()
            if len(state) == entry.size and zlib.crc32(state) == header["crc32"]:
                os.utime(path)
                return state
        self._drop(name)
        return None

    # -- files --------------------------------------------------------------------------------------------------------

    def _name(self, tokens: Tokens, namespace: str) -> str:
        key = f"{self._fingerprint}\0{namespace}\0".encode() + tokens.tobytes()
        return blake2b(key, digest_size=16).hexdigest() + _SUFFIX

    def _write(self, path: Path, tokens: Tokens, namespace: str, state: bytes) -> None:
        """Write a file so that it is there as a whole or not at all."""
        header = {
            "fingerprint": self._fingerprint,
            "namespace": namespace,
            "num_tokens": int(tokens.size),
            "size": len(state),
            "crc32": zlib.crc32(state),
        }
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(part, "wb", opener=open_private) as file:
                file.write(json.dumps(header).encode() + b"\n" + tokens.tobytes())
                file.write(state)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _read_directory(self, directory: Path) -> Iterator[tuple[str, _Entry]]:
        """Yield what is stored, the least recently used first; delete what this model cannot use."""
        for path in sorted(directory.glob(f"*{_SUFFIX}"), key=_last_use):
            try:
                protect_file(path)
                with path.open("rb") as file:
                    header = json.loads(file.readline())
                    tokens = np.frombuffer(file.read(4 * header["num_tokens"]), np.int32)
                    entry = _Entry(tokens, header["namespace"], header["size"], None)
                if path.name != self._name(tokens, entry.namespace):
                    raise ValueError("written for another model or by another version")
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
                continue
            yield path.name, entry

    def _shrink(self) -> None:
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._num_bytes -= entry.size
        if self._directory is not None:
            with suppress(OSError):
                (self._directory / name).unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
