"""Folders and files that have texts or secrets, which nobody but their owner may read, whatever the umask.

What is there already is made so too. What belongs to somebody else cannot be: that is logged, and it is used as it is.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

__all__ = ["make_folder", "open_private", "protect_file", "protect_folder"]

_log = logging.getLogger("legato.system.permissions")


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for their owner alone; one that is there stays as it is."""
    for level in (*reversed(folder.parents), folder):
        if not level.exists():
            level.mkdir(0o700, exist_ok=True)
            level.chmod(0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def open_private(path: str, flags: int) -> int:
    """Open a file that is to be written anew, as an `opener` does, for its owner alone."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def protect_folder(folder: Path) -> None:
    """Let only its owner into a folder, which is created if it is missing."""
    make_folder(folder)
    found = folder.stat()
    # A folder such as /tmp is everybody's on purpose. One of another owner that lets us in by its group is, too.
    is_shared = found.st_mode & stat.S_ISVTX or (found.st_uid != os.geteuid() and not found.st_mode & 0o007)
    if stat.S_IMODE(found.st_mode) & 0o077 and not is_shared:
        _change(folder, stat.S_IMODE(found.st_mode) & ~0o777 | 0o700, found)


def protect_file(file: Path, *, create: bool = False) -> None:
    """Let only its owner read and write a file. One that is missing is created on request."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        if create:
            raise
        return
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != 0o600:
        _change(file, 0o600, found)


def _change(path: Path, mode: int, found: os.stat_result) -> None:
    try:
        path.chmod(mode)
    except PermissionError:
        _log.warning(
            "%s belongs to user %d and has mode %04o, which lets others read it; make it %04o",
            *(path, found.st_uid, stat.S_IMODE(found.st_mode), mode),
        )
