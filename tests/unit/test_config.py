"""Settings: which layer wins, and what is said about a value that is not allowed."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from legato.config import (
    ModelSettings,
    ServerSettings,
    Settings,
    check_exposure,
    child_environment,
    is_loopback,
    load_settings,
    worker_environment,
)
from legato.errors import ConfigError
from legato.system.machine import cores


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but the test's own."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("LEGATO_"):
            monkeypatch.delenv(name)


def load(text: str = "", flags: dict[str, Any] | None = None, only_model: str | None = None) -> Settings:
    """Read settings with `text` as `legato.toml`; the default model is `m`."""
    if text:
        Path("legato.toml").write_text(text, "utf-8")
    return load_settings(None, flags=flags or {}, default_model="m", only_model=only_model)


def refusal(text: str = "", flags: dict[str, Any] | None = None, only_model: str | None = None) -> str:
    """Return what is said about settings that are refused."""
    with pytest.raises(ConfigError) as caught:
        load(text, flags, only_model)
    return caught.value.message


# -- layers -----------------------------------------------------------------------------------------------------------


def test_nothing_configured() -> None:
    settings = load()
    assert settings.server == ServerSettings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    assert settings.models == {"m": ModelSettings()}
    assert settings.models["m"].num_threads == cores().num
    assert settings.data_dir.name == "legato"


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[server]\nport = 1\nhost = 'localhost'\n[limits]\nmax_running = 3"
    assert load(text).server.port == 1
    monkeypatch.setenv("LEGATO_SERVER_PORT", "2")
    assert load(text).server.port == 2
    settings = load(text, {"server": {"port": 3, "host": None}})
    assert settings.server.port == 3
    assert settings.server.host == "localhost"
    assert settings.limits.max_running == 3
    assert settings.limits.max_waiting == 256


def test_a_named_file_is_read_instead(tmp_path: Path) -> None:
    Path("legato.toml").write_text("[server]\nport = 1")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2")
    assert load_settings(other, flags={}, default_model="m").server.port == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_settings(path, flags={}, default_model="m")
        return caught.value.message

    assert message(tmp_path / "no.toml") == f"configuration file {tmp_path / 'no.toml'} does not exist"
    assert message(tmp_path) == f"configuration file {tmp_path} cannot be read: Is a directory"
    broken = tmp_path / "broken.toml"
    broken.write_text("[server")
    assert message(broken).startswith(f"configuration file {broken} is not TOML: ")
    broken.write_bytes(b"a = '\xe9'")
    assert message(broken).startswith(f"configuration file {broken} is not TOML: 'utf-8' codec can't decode byte 0xe9")


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sever]\nport = 1", "`sever` (legato.toml) is no setting; did you mean `server`?"),
        ("[server]\nprot = 1", "`server.prot` (legato.toml) is no setting; did you mean `port`?"),
        (
            "[server]\nzzz = 1",
            "`server.zzz` (legato.toml) is no setting; "
            "known: allowed_hosts, api_keys, cors_origins, host, insecure, log_format, port, traces_url",
        ),
        ("[models.m]\nnum_cell = 1", "`models.m.num_cell` (legato.toml) is no setting; did you mean `num_cells`?"),
        (
            "[models.qwen2.5-coder]\npath = 'x.gguf'",
            "`models.qwen2.5-coder` (legato.toml) is no setting; known: context_length, engine, num_cells, "
            "num_threads, path, reasoning_close, reasoning_open, spill_bytes, spill_dir, "
            "tokenizer, upstream_key, upstream_model, upstream_plugin, urls; a name with dots needs quotes",
        ),
    ],
)
def test_an_unknown_key_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_variable_that_sets_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_SERVER_PROT", "1")
    assert refusal() == ("environment variable `LEGATO_SERVER_PROT` sets nothing; did you mean `LEGATO_SERVER_PORT`?")


def test_a_model_name_may_have_dots() -> None:
    settings = load('[models."qwen2.5-coder-0.5b"]\ncontext_length = 9')
    assert settings.models == {"qwen2.5-coder-0.5b": ModelSettings(context_length=9)}
    text = '[models."qwen2.5-coder-0.5b"]\ncontext_length = "9"'
    assert refusal(text) == "`models.qwen2.5-coder-0.5b.context_length` (legato.toml) must be a whole number, got '9'"


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server = 5", "`server` (legato.toml) must be a table, got 5"),
        ("models = ['m']", "`models` (legato.toml) must be a table, got ['m']"),
        ("models.m = 'm.gguf'", "`models.m` (legato.toml) must be a table, got 'm.gguf'"),
        ("data_dir = 5", "`data_dir` (legato.toml) must be a path, got 5"),
        ("[server]\nport = '1'", "`server.port` (legato.toml) must be a whole number, got '1'"),
        ("[server]\nport = 1.0", "`server.port` (legato.toml) must be a whole number, got 1.0"),
        ("[server]\nport = true", "`server.port` (legato.toml) must be a whole number, got True"),
        ("[server]\nport = 65536", "`server.port` (legato.toml) must be between 0 and 65535, got 65536"),
        ("[server]\nhost = 5", "`server.host` (legato.toml) must be a text, got 5"),
        ("[server]\ninsecure = 1", "`server.insecure` (legato.toml) must be true or false, got 1"),
        ("[server]\nallowed_hosts = 'a'", "`server.allowed_hosts` (legato.toml) must be a list of texts, got 'a'"),
        ("[server]\nallowed_hosts = [1]", "`server.allowed_hosts` (legato.toml) must be a list of texts, got [1]"),
        ("[server]\napi_keys = 'secret'", "`server.api_keys` (legato.toml) must be a list of texts, got ***"),
        ("[server]\napi_keys = ['']", "`server.api_keys` has an empty key"),
        ("[limits]\nmax_wait_s = '1'", "`limits.max_wait_s` (legato.toml) must be a number, got '1'"),
        ("[limits]\nmax_wait_s = nan", "`limits.max_wait_s` (legato.toml) must be at least 0.001, got nan"),
        ("[limits]\nmax_running = 0", "`limits.max_running` (legato.toml) must be at least 1, got 0"),
        (
            "[models.m]\nengine = 'vllm'",
            "`models.m.engine` (legato.toml) must be `llamacpp` or `scripted` or `upstream`, got 'vllm'",
        ),
        (
            "[models.m]\nnum_cells = -1",
            "`models.m.num_cells` (legato.toml) must be between 0 and 2147483647, got -1",
        ),
        ("[models.m]\nnum_threads = 0", "`models.m.num_threads` (legato.toml) must be between 1 and 512, got 0"),
        ("[aliases]\ngpt = 1", "`aliases.gpt` (legato.toml) must be a text, got 1"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_flag_that_is_not_allowed_is_refused() -> None:
    assert refusal(flags={"server": {"port": -1}}) == (
        "`server.port` (command line) must be between 0 and 65535, got -1"
    )


def test_a_whole_number_is_a_number() -> None:
    wait_s = load("[limits]\nmax_wait_s = 5").limits.max_wait_s
    assert (type(wait_s), wait_s) == (float, 5.0)


def test_variables_are_read_as_their_settings_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LEGATO_SERVER_API_KEYS": "one, two,",
        "LEGATO_SERVER_ALLOWED_HOSTS": "",
        "LEGATO_SERVER_INSECURE": "True",
        "LEGATO_LIMITS_BODY_TIMEOUT_S": "2.5",
        "LEGATO_LIMITS_MAX_RUNNING": "7",
        "LEGATO_DATA_DIR": "~/models",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load()
    assert settings.server == ServerSettings(api_keys=("one", "two"), allowed_hosts=(), insecure=True)
    assert settings.limits.body_timeout_s == 2.5
    assert settings.limits.max_running == 7
    assert settings.data_dir == Path.home() / "models"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("LEGATO_SERVER_PORT", "http", "`server.port` ({}) must be a whole number, got 'http'"),
        ("LEGATO_SERVER_INSECURE", "yes", "`server.insecure` ({}) must be true or false, got 'yes'"),
        ("LEGATO_LIMITS_MAX_WAIT_S", "1 s", "`limits.max_wait_s` ({}) must be a number, got '1 s'"),
    ],
)
def test_a_variable_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    monkeypatch.setenv(name, value)
    assert refusal() == accepted.format(f"environment variable {name}")


# -- paths ------------------------------------------------------------------------------------------------------------

PATHS = [
    "data_dir = '{}'",
    "[store]\nurl = 'sqlite:///{}'",
    "[models.m]\npath = '{}'",
    "[models.m]\nspill_dir = '{}'",
    "[models.m]\nengine = 'upstream'\nurls = ['http://a']\ntokenizer = '{}'",
]


def names(text: str) -> str:
    """Return the setting that one of `PATHS` sets."""
    table, _, option = text.rpartition("\n")
    return f"{table.partition(']')[0].lstrip('[')}.{option.partition(' =')[0]}".lstrip(".")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as in a container that runs under any number."""

    def find(name: object) -> None:
        raise KeyError(f"not found: {name}")

    for variable in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find)


@pytest.mark.parametrize("text", PATHS)
def test_a_home_folder_is_found_in_every_path(text: str) -> None:
    assert str(Path.home() / "x") in repr(load(text.format("~/x")))
    assert str(Path("~root/x").expanduser()) in repr(load(text.format("~root/x")))
    assert "a/~b" in repr(load(text.format("a/~b")))


@pytest.mark.parametrize("text", PATHS)
@pytest.mark.parametrize("path", ["~nosuchuser/x", "~nosuchuser", "~/x", "~"])
@pytest.mark.usefixtures("homeless")
def test_a_home_folder_that_is_not_there_is_said_with_the_setting(text: str, path: str) -> None:
    said = refusal(text.format(path), {} if text.startswith("data_dir") else {"data_dir": "/d"})
    assert said == f"`{names(text)}` (legato.toml) must be a path, got {path!r}, and there is no such home folder"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_the_data_folder_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal()
    assert said.startswith("`data_dir` must be set, as `LEGATO_DATA_DIR=/path`")
    assert "\n" not in said
    monkeypatch.setenv("LEGATO_DATA_DIR", "/d")
    assert load().data_dir == Path("/d")
    monkeypatch.delenv("LEGATO_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load().data_dir == Path("/data/legato")


@pytest.mark.parametrize("text", PATHS)
def test_a_path_with_a_zero_byte_is_refused(text: str) -> None:
    assert "must be a path, got 'a\\x00b'" in refusal(text.format("a\\u0000b").replace("'", '"'))


# -- settings seen together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_others_are_let_in_only_with_keys_or_on_purpose(host: str) -> None:
    with pytest.raises(ConfigError, match=f"`server.host` is {host}, which others can reach, and there are no keys"):
        check_exposure(ServerSettings(host=host), has_keys=False)
    check_exposure(ServerSettings(host=host), has_keys=True)
    check_exposure(ServerSettings(host=host, insecure=True), has_keys=False)
    check_exposure(ServerSettings(host=host, api_keys=("k",)), has_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    check_exposure(load(f"[server]\nhost = '{host}'").server, has_keys=False)


def test_an_alias_for_a_model_that_is_not_served_is_refused() -> None:
    assert load("[aliases]\ngpt = 'm'").aliases == {"gpt": "m"}
    assert refusal("[aliases]\ngpt = 'n'") == ("`aliases.gpt` names model `n`, which is not served; served: `m`")
    assert refusal("[models.a]\n[models.b]\n[aliases]\ngpt = 'm'").endswith("served: `a`, `b`")


def test_one_model_alone() -> None:
    text = "[models.a]\nnum_cells = 1\n[models.b]\n[aliases]\nx = 'a'\ny = 'b'"
    settings = load(text, only_model="a")
    assert settings.models == {"a": ModelSettings(num_cells=1)}
    assert settings.aliases == {"x": "a"}
    assert load(text, only_model="y").models == {"b": ModelSettings()}
    assert load(text, only_model="c").models == {"c": ModelSettings()}
    assert load(text, only_model="dir/a.gguf").models == {"a": ModelSettings(path="dir/a.gguf", num_cells=1)}
    assert load(text, only_model="d.gguf").models == {"d": ModelSettings(path="d.gguf")}


HASH = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("key", ["abc", f"sha256:{HASH}"])
def test_keys_are_kept_as_hashes(key: str) -> None:
    server = load(f"[server]\napi_keys = ['{key}']").server
    assert [digest.hex() for digest in server.key_digests()] == [HASH]
    assert server.api_keys == (f"sha256:{HASH}",)


@pytest.mark.parametrize("key", ["sha256:", "sha256:abc", f"sha256:{HASH.upper()}", f"sha256:{HASH}0"])
def test_what_begins_like_a_hash_must_be_one(key: str) -> None:
    size = len(key) - len("sha256:")
    assert refusal(f"[server]\napi_keys = ['{key}']") == (
        f"`server.api_keys` must have 64 of 0-9 and a-f after `sha256:`, got {size} characters"
    )


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "https://example.org",
        "http://localhost:3000",
        "http://[::1]:80",
        "vscode-webview://1a-b",
        "app://obsidian.md",
    ],
)
def test_origins_are_taken_as_browsers_send_them(origin: str) -> None:
    assert load(f"[server]\ncors_origins = ['{origin}']").server.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["", "example.org", "https://example.org/", "https://Example.org", "https://*.example.org", "null"]
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    message = refusal(f"[server]\ncors_origins = ['{origin}']")
    assert message.startswith("`server.cors_origins` must have origins as browsers send them, `https://example.org` or")
    assert message.endswith(f", got {origin!r}")


# -- processes --------------------------------------------------------------------------------------------------------


def test_the_environment_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "thing")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert child_environment() == dict(os.environ)
    assert child_environment(SOME="other") == {**os.environ, "SOME": "other"}
    assert worker_environment() == {**os.environ, "GOMP_SPINCOUNT": "2000"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert worker_environment()["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in worker_environment()


def test_tags_of_thinking_come_in_pairs() -> None:
    message = "`models.m.reasoning_open` needs `models.m.reasoning_close` beside it"
    assert refusal('[models.m]\nreasoning_open = "<think>"') == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.m]\nurls = ['http://a']", '`models.m.urls` needs `models.m.engine` to be "upstream"'),
        (
            "[models.m]\nengine = 'upstream'\ntokenizer = 't'\nurls = ['gpu-1:8000']",
            "`models.m.urls` must have addresses such as `http://gpu-1:8000`, got 'gpu-1:8000'",
        ),
        (
            "[models.m]\nengine = 'upstream'\ntokenizer = 't'\nurls = ['http://me:secret@gpu-1']",
            "`models.m.urls` must have addresses such as `http://gpu-1:8000`, got 'http://...@gpu-1'",
        ),
        (
            "[models.m]\nengine = 'upstream'\ntokenizer = 't'\nurls = ['http://gpu-1/v1?x=1']",
            "`models.m.urls` must have addresses such as `http://gpu-1:8000`, got 'http://gpu-1/v1?x=1'",
        ),
        (
            "[models.m]\nengine = 'upstream'\ntokenizer = 't'\nurls = ['http://a']\nupstream_key = \"a\\nb\"",
            "`models.m.upstream_key` must be ASCII without control characters",
        ),
        ("[models.m]\nengine = 'upstream'", '`models.m.engine` "upstream" needs `models.m.urls`'),
        (
            "[models.m]\nengine = 'upstream'\nurls = ['http://a']",
            '`models.m.engine` "upstream" needs `models.m.tokenizer`',
        ),
    ],
)
def test_an_upstream_needs_its_settings_and_no_other_engine_takes_them(text: str, message: str) -> None:
    assert refusal(text) == message
