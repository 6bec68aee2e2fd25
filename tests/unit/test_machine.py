"""How many cores a process has: those it may run on, and no more than its control groups pay for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legato.config import ModelSettings
from legato.system.machine import Cores, cores

V2 = "36 25 0:31 {top} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 25 0:28 {top} {mount} rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
OTHERS = (
    "25 30 0:23 / /sys rw,nosuid - sysfs sysfs rw",
    "34 25 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
)


def machine(root: Path, groups: list[str], mounts: list[str], quotas: dict[str, str]) -> float | None:
    """Return the quota that is found on a machine. `quotas`: by file, below `root`."""
    files = {
        "proc/self/cgroup": "\n".join(groups),
        "proc/self/mountinfo": "\n".join([OTHERS[0], *mounts, OTHERS[1]]),
        **quotas,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return cores(root).quota


def v2(root: Path, group: str, quotas: dict[str, str], top: str = "/", mount: str = "/sys/fs/cgroup") -> float | None:
    """The same with cgroup v2. `quotas`: by folder below the mount."""
    place = mount.replace("\\040", " ").lstrip("/")
    files = {f"{place}/{folder}/cpu.max": text for folder, text in quotas.items()}
    return machine(root, [f"0::{group}"], [V2.format(top=top, mount=mount)], files)


def v1(root: Path, group: str, quotas: dict[str, tuple[int, int]], top: str = "/") -> float | None:
    """The same with cgroup v1. `quotas`: microseconds, and of how many, by folder below the mount."""
    files = {}
    for folder, (quota, period) in quotas.items():
        files[f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_quota_us"] = str(quota)
        files[f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us"] = str(period)
    groups = ["11:memory:/x", f"4:cpu,cpuacct:{group}", "3:cpuset:/y", "1:name=systemd:/z", "0::/init"]
    return machine(root, groups, [V1.format(top=top, mount="/sys/fs/cgroup/cpu,cpuacct")], files)


def test_v2(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {".": "100000 100000"}) == 1
    assert v2(tmp_path, "/", {".": "max 100000"}) is None
    assert v2(tmp_path, "/a/b", {".": "max 100000", "a": "150000 100000", "a/b": "max 100000"}) == 1.5
    assert v2(tmp_path, "/a/b", {"a": "400000 100000", "a/b": "50000 100000"}) == 0.5
    assert v2(tmp_path, "/a/b", {"a": "50000 100000", "a/b": "400000 100000"}) == 0.5


def test_v1(tmp_path: Path) -> None:
    assert v1(tmp_path, "/", {".": (-1, 100_000)}) is None
    assert v1(tmp_path, "/a", {".": (-1, 100_000), "a": (250_000, 100_000)}) == 2.5
    assert v1(tmp_path, "/a/b", {"a": (50_000, 50_000), "a/b": (300_000, 100_000)}) == 1


def test_a_container_sees_its_own_group_alone(tmp_path: Path) -> None:
    """Without a namespace for groups, the paths are those of the host; with one, they may begin above the mount."""
    assert v1(tmp_path / "1", "/docker/c0ffee", {".": (200_000, 100_000)}, top="/docker/c0ffee") == 2
    assert v1(tmp_path / "2", "/docker/c0ffee/x", {"x": (100_000, 100_000)}, top="/docker/c0ffee") == 1
    assert v1(tmp_path / "3", "/elsewhere", {".": (300_000, 100_000)}, top="/docker/c0ffee") == 3
    assert v2(tmp_path / "4", "/../../x", {".": "100000 100000"}) == 1
    assert v2(tmp_path / "5", "/kubepods/pod", {".": "100000 100000"}, top="/kubepods/pod") == 1


def test_a_mount_with_spaces(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {".": "100000 100000"}, mount="/sys/fs/c\\040group") == 1


@pytest.mark.parametrize("text", ["", "x y", "100000", "100000 0", "-1 -1"])
def test_what_cannot_be_read_is_no_quota(tmp_path: Path, text: str) -> None:
    assert v2(tmp_path, "/", {".": text}) is None


def test_without_proc_there_is_no_quota(tmp_path: Path) -> None:
    assert cores(tmp_path) == Cores(len(os.sched_getaffinity(0)), None)


@pytest.mark.parametrize(
    ("allowed", "quota", "num"),
    [(64, None, 64), (64, 1.0, 1), (64, 1.5, 2), (64, 0.2, 1), (2, 8.0, 2), (2, 1.01, 2), (1, None, 1)],
)
def test_threads_for_a_quota(allowed: int, quota: float | None, num: int) -> None:
    assert Cores(allowed, quota).num == num


def test_what_is_said_of_cores() -> None:
    assert str(Cores(1, None)) == "1 core"
    assert str(Cores(2, 4.0)) == "2 cores"
    assert str(Cores(64, 1.5)) == "2 cores (a quota of 1.5, where it may run on 64)"


def test_a_process_in_a_group_with_a_quota() -> None:
    """The real thing, where control groups can be made: with a quota below one core, one thread computes."""
    group = next(
        (top for top in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if (top / "cpu.stat").exists()), None
    )
    if group is None:
        pytest.skip("there are no control groups for processor time")
    outer = group / f"legato-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        if (outer / "cpu.max").exists():
            (outer / "cpu.max").write_text("70000 100000")
        else:
            (outer / "cpu.cfs_quota_us").write_text("70000")
    except OSError as error:
        for folder in (inner, outer):
            if folder.is_dir():
                folder.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    script = (
        f"open('{inner}/cgroup.procs', 'w').write('0')\n"
        "from legato.config import ModelSettings; from legato.system.machine import cores\n"
        "print(cores().quota, ModelSettings().num_threads)"
    )
    try:
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "0.7 1\n"
    finally:
        inner.rmdir()
        outer.rmdir()


def test_threads_by_default() -> None:
    assert ModelSettings().num_threads == cores().num
