"""Nobody but their owner may read what has texts or secrets, whatever the umask, and whatever was there before."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from legato.cli.options import open_store
from legato.config import Settings, StoreSettings
from legato.engines.llamacpp.spill import Spill
from legato.errors import ConfigError
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.system.permissions import make_folder, protect_file, protect_folder


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277], ids=oct, autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the umask is."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Who may do what."""
    return stat.S_IMODE(path.stat().st_mode)


def write(store: Store) -> None:
    """Let SQLite have something beside its file."""
    store.create_key(Key("a"))


def modes(folder: Path) -> dict[str, int]:
    """The modes of all that is in a folder, and its own."""
    return {".": mode(folder), **{path.name: mode(path) for path in folder.iterdir()}}


PRIVATE = {".": 0o700, "legato.db": 0o600, "legato.db-wal": 0o600, "legato.db-shm": 0o600}


def test_a_new_data_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "share" / "legato"
    with open_store(Settings(data_dir=folder)) as store:
        write(store)
        assert modes(folder) == PRIVATE
    assert mode(folder.parent) == 0o700


def test_what_is_there_already_is_made_so(tmp_path: Path) -> None:
    folder = tmp_path / "legato"
    settings = Settings(data_dir=folder)
    with open_store(settings) as first:
        write(first)
        for path in folder.iterdir():
            path.chmod(0o666)
        folder.chmod(0o2775)
        with open_store(settings) as second:
            second.keys()
            assert modes(folder) == {**PRIVATE, ".": 0o2700}


def test_a_rollback_journal_is_protected_too(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")):
        pass
    for name in ("legato.db", "legato.db-journal"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")):
        assert mode(tmp_path / "legato.db") == 0o600
        assert not (tmp_path / "legato.db-journal").exists() or mode(tmp_path / "legato.db-journal") == 0o600


def test_the_folder_of_a_database_elsewhere_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    url = f"sqlite:///{tmp_path}/a/b/x.db"
    with open_store(Settings(data_dir=tmp_path / "none", store=StoreSettings(url=url))) as store:
        write(store)
        assert mode(tmp_path) == 0o755
        assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
        assert {mode(path) for path in (tmp_path / "a" / "b").iterdir()} == {0o600}
    assert not (tmp_path / "none").exists()


def test_a_database_in_memory_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Store.open("sqlite:///:memory:")), closing(Store.open("sqlite://")):
        assert list(tmp_path.iterdir()) == []


def test_what_is_spilled_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "spill" / "m"
    tokens = np.arange(5, dtype=np.int32)
    Spill(1000, folder, "f").put(tokens, "", b"state")
    (file,) = folder.iterdir()
    assert (mode(folder.parent), mode(folder), mode(file)) == (0o700, 0o700, 0o600)
    file.chmod(0o644)
    folder.chmod(0o755)
    assert len(Spill(1000, folder, "f")) == 1
    assert (mode(folder), mode(file)) == (0o700, 0o600)


def test_a_folder_for_everybody_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    protect_folder(tmp_path)
    assert mode(tmp_path) == 0o1777


def test_what_cannot_be_a_folder_is_said_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`data_dir` .*/file/x cannot be used: Not a directory"):
        open_store(Settings(data_dir=tmp_path / "file" / "x"))


def test_what_others_own_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away, and act as somebody else")
    make_folder(tmp_path / "others")
    (tmp_path / "others" / "file").touch()
    (tmp_path / "others" / "file").chmod(0o666)
    for path in (path for path in tmp_path.parents if "pytest-of-" in str(path)):
        path.chmod(0o755)
    os.chown(tmp_path / "others" / "file", 54321, 0)
    os.chown(tmp_path / "others", 54321, 0)
    tmp_path.chmod(0o755)
    os.seteuid(12345)
    try:
        (others := tmp_path / "others").stat()
    finally:
        os.seteuid(0)
    for given, warned in ((0o777, 1), (0o2770, 0), (0o1777, 0)):
        others.chmod(given)
        caplog.clear()
        os.seteuid(12345)
        try:
            protect_folder(others)
        finally:
            os.seteuid(0)
        assert len(caplog.records) == warned
        assert mode(others) == given
    others.chmod(0o777)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    os.seteuid(12345)
    try:
        protect_file(others / "file")
    finally:
        os.seteuid(0)
    assert "belongs to user 54321 and has mode 0666" in caplog.text


def test_a_database_is_one_again_after_all_this(tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        write(store)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/legato.db")
    with engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA integrity_check")).scalar() == "ok"
    engine.dispose()
