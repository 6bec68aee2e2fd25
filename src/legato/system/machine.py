"""What the machine, or the container, lets this process use: processor cores, and open files.

It asks the kernel alone: which cores the process may run on, the quotas of its control groups (cgroup v1 and v2) and
its limit of open files. It decides nothing about models.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["Cores", "cores", "max_open_files"]


@dataclass(frozen=True, slots=True)
class Cores:
    """The processor's cores, as far as this process has them."""

    allowed: int
    """It may run on so many."""
    quota: float | None
    """It gets the time of so many, all its threads together; None: there is no quota."""

    @property
    def num(self) -> int:
        """How many threads can compute at a time. A part of a core counts as one: unused, it would be lost."""
        return self.allowed if self.quota is None else min(self.allowed, max(1, math.ceil(self.quota)))

    def __str__(self) -> str:
        shown = f"{self.num} {'core' if self.num == 1 else 'cores'}"
        if self.quota is None or self.quota >= self.allowed:
            return shown
        return f"{shown} (a quota of {self.quota:g}, where it may run on {self.allowed})"


def cores(root: Path = Path("/")) -> Cores:
    """Return what this process has. `root` is where `proc` and what is mounted are found."""
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return Cores(len(os.sched_getaffinity(0)), min(quotas, default=None))


def max_open_files() -> int:
    """Return how many files, connections among them, this process may have open at a time."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may have a quota of time, from its own up to the top."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    mine = {}
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            mine["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(path)
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in mine and (kind == "cgroup2" or "cpu" in options.rpartition(" ")[2].split(",")):
            top, place = map(_unescape, before.split(" ")[3:5])
            yield from _upwards(mine[kind], PurePosixPath(top), root / place.lstrip("/"))


def _upwards(group: PurePosixPath, top: PurePosixPath, mount: Path) -> Iterator[Path]:
    """Yield the folders of a group and those above it. `mount` is where the group `top` is mounted.

    In a container the group's path may be that of the host, of which nothing is to be seen but what is mounted.
    """
    inside = group.relative_to(top) if group.is_relative_to(top) and ".." not in group.parts else PurePosixPath()
    for folder in (inside, *inside.parents):
        if (mount / folder).is_dir():
            yield mount / folder


def _unescape(path: str) -> str:
    """Return a path as it is; `mountinfo` has spaces in octal."""
    return path.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")


def _quota(folder: Path) -> float | None:
    """Return how many cores' time a group has; None: as much as there is."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(limit) > 0:  # `max` is no number; cgroup v1 has -1.
            return int(limit) / int(period)
    return None
