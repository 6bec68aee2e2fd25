"""What Kubernetes says of Services is no setting, whatever they are called; anything else still has to be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.config import load_settings
from legato.errors import ConfigError
from legato.system.service_links import is_service_link


def service(name: str, host: str, ports: dict[str, tuple[int, str]]) -> dict[str, str]:
    """What Kubernetes sets for a Service (`pkg/kubelet/envvars`). `ports`: by name, number and protocol."""

    def upper(text: str) -> str:
        return text.upper().replace("-", "_")

    prefix = upper(name)
    joined = f"[{host}]" if ":" in host else host
    (first, first_protocol), *_ = ports.values()
    found = {
        f"{prefix}_SERVICE_HOST": host,
        f"{prefix}_SERVICE_PORT": str(first),
        f"{prefix}_PORT": f"{first_protocol}://{joined}:{first}",
    }
    for port, (number, protocol) in ports.items():
        if port:
            found[f"{prefix}_SERVICE_PORT_{upper(port)}"] = str(number)
        link = f"{prefix}_PORT_{number}_{protocol.upper()}"
        found[link] = f"{protocol}://{joined}:{number}"
        found[f"{link}_PROTO"] = protocol
        found[f"{link}_PORT"] = str(number)
        found[f"{link}_ADDR"] = host
    return found


SERVICES = [
    service("legato", "10.96.3.7", {"": (8080, "tcp")}),
    service("legato", "fd00:10:96::7", {"http": (80, "tcp"), "https-alt": (8443, "tcp"), "dns": (53, "udp")}),
    service("legato-server", "172.20.0.1", {"http": (8080, "tcp")}),
    service("legato-foo-2", "10.0.0.9", {"sigtran": (3868, "sctp")}),
    service("legato-limits", "10.0.0.9", {"": (1, "tcp")}),
    service("legato-data-dir", "10.0.0.9", {"": (65535, "tcp")}),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("variables", SERVICES, ids=lambda variables: next(iter(variables)))
def test_a_service_sets_nothing(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        assert is_service_link(name, value), name
        monkeypatch.setenv(name, value)
    settings = load_settings(None, flags={}, default_model="m")
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)


def test_a_setting_of_the_same_name_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SERVICES[2], "LEGATO_SERVER_PORT": "9000", "LEGATO_SERVER_HOST": "127.0.0.2"}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(None, flags={}, default_model="m")
    assert (settings.server.host, settings.server.port) == ("127.0.0.2", 9000)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("LEGATO_SERVER_PROT", "8080", "did you mean `LEGATO_SERVER_PORT`"),
        ("LEGATO_SERVICE_HOST", "0.0.0.0", "did you mean `LEGATO_SERVER_HOST`"),
        ("LEGATO_SERVICE_HOST", "127.0.0.1", "did you mean `LEGATO_SERVER_HOST`"),
        ("LEGATO_SERVICE_PORT", "http", "did you mean `LEGATO_SERVER_PORT`"),
        ("LEGATO_PORT", "8080", "did you mean `LEGATO_SERVER_PORT`"),
        ("LEGATO_PORT", "tcp://10.0.0.1", "did you mean `LEGATO_SERVER_PORT`"),
        ("LEGATO_PORT_8080_TCP", "http://10.0.0.1:8080", "sets nothing"),
        ("LEGATO_PORT_8080_TCP_PROTO", "http", "sets nothing"),
        ("LEGATO_PORT_8080_TCP_ADDR", "localhost", "sets nothing"),
        ("LEGATO_SERVER_PORT", "tcp://10.0.0.1:99999", "must be a whole number"),
        ("LEGATO_SERVER_PORT", "tcp://0.0.0.0:8080", "must be a whole number"),
    ],
)
def test_what_is_no_link_must_be_a_setting(name: str, value: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings(None, flags={}, default_model="m")
    assert name in caught.value.message
    assert hint in caught.value.message
