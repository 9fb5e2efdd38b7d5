"""Settings come from the environment, are bounded, and say clearly what is wrong."""

import subprocess
import sys

import pytest
from fencepost_server.config import Config, ConfigError, is_loopback, load_config, split_address

URL = "postgresql://fencepost@127.0.0.1:5432/fencepost"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"FENCEPOST_{name.upper()}", raising=False)


def test_only_the_database_is_required() -> None:
    config = load_config(database_url=URL)
    assert config.listen == "127.0.0.1:7600"
    assert config.roles == {"api", "scheduler"}
    assert config.heartbeat_interval_s == 10.0
    assert config.reflection


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_DATABASE_URL", URL)
    monkeypatch.setenv("FENCEPOST_ROLES", "api, scheduler")
    monkeypatch.setenv("FENCEPOST_LISTEN", "[::1]:7700")
    monkeypatch.setenv("FENCEPOST_LOG_LEVEL", "DEBUG")
    # Settings of the command line share the prefix and are none of the server's.
    monkeypatch.setenv("FENCEPOST_SERVER", "localhost:7600")
    config = load_config()
    assert config.roles == {"api", "scheduler"}
    assert config.listen == "[::1]:7700"
    assert config.log_level == "debug"


def test_every_setting_is_described() -> None:
    undescribed = [name for name, field in Config.model_fields.items() if not field.description]
    assert undescribed == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({}, ["FENCEPOST_DATABASE_URL", "required"]),
        ({"database_url": "mysql://x"}, ["FENCEPOST_DATABASE_URL", "postgresql://"]),
        ({"database_url": URL, "listen": "0.0.0.0:7600"}, ["0.0.0.0:7600", "FENCEPOST_INSECURE"]),
        ({"database_url": URL, "listen": "example.org:1"}, ["example.org:1", "127.0.0.1"]),
        ({"database_url": URL, "listen": "7600"}, ["FENCEPOST_LISTEN=7600", "host:port"]),
        ({"database_url": URL, "listen": "::1:7600"}, ["FENCEPOST_LISTEN", "[address]:port"]),
        ({"database_url": URL, "listen": "localhost:99999"}, ["99999", "0 to 65535"]),
        ({"database_url": URL, "roles": "api,cook"}, ["FENCEPOST_ROLES", "'api' or 'scheduler'"]),
        ({"database_url": URL, "roles": ""}, ["FENCEPOST_ROLES"]),
        ({"database_url": URL, "heartbeat_interval_s": 11}, ["HEARTBEAT_INTERVAL_S=11", "10"]),
        ({"database_url": URL, "tick_s": "nan"}, ["FENCEPOST_TICK_S"]),
        ({"database_url": URL, "fire_batch_max": 0}, ["FENCEPOST_FIRE_BATCH_MAX=0"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    overrides: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**overrides)
    assert [word for word in words if word not in str(caught.value)] == []


def test_every_wrong_setting_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(database_url=URL, tick_s=9, claim_batch_max=-1)
    assert len(caught.value.problems) == 2


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(database_url="http://fencepost:secret@db/fencepost")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(load_config(database_url="postgresql://a:secret@db/b"))


def test_insecure_allows_any_address() -> None:
    assert load_config(database_url=URL, listen="0.0.0.0:7600", insecure=True).insecure


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("db", False)],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_address_is_split() -> None:
    assert split_address("[::1]:0") == ("::1", 0)
    assert split_address("localhost:7600") == ("localhost", 7600)


def test_settings_need_no_grpc() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys, fencepost_server.config; print('grpc' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "False"
