"""Settings: where a value comes from, what is refused, and that a refusal tells the reader what to change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import Settings, load_settings, origins


@pytest.fixture(autouse=True)
def empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of the developer's machine decides here."""
    for name in list(os.environ):
        if name.startswith("TURNMILL_") or name in ("REDIS_URL", "PORT"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write_file(text: str) -> None:
    Path("turnmill.toml").write_text(text, encoding="utf-8")


def refusal(**overrides: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(**overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def test_defaults_agree_with_each_other() -> None:
    settings = load_settings()
    assert settings.redis_url is None
    assert (settings.namespace, settings.partitions, settings.wire) == ("tm", 4, "json")
    assert (settings.host, settings.port) == ("127.0.0.1", 8321)
    assert settings.data_dir == Path(".turnmill")


def test_argument_beats_variable_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    write_file("partitions = 2\nmax_attempts = 2\nsession_queue_max = 2")
    monkeypatch.setenv("TURNMILL_PARTITIONS", "3")
    monkeypatch.setenv("TURNMILL_MAX_ATTEMPTS", "3")
    settings = load_settings(partitions=7, port=None)
    assert (settings.partitions, settings.max_attempts, settings.session_queue_max) == (7, 3, 2)
    assert settings.port == 8321


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().partitions = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"REDIS_URL": "redis://fallback"}, "redis://fallback"),
        ({"REDIS_URL": "redis://fallback", "TURNMILL_REDIS_URL": "redis://ours"}, "redis://ours"),
        ({"REDIS_URL": "redis://fallback", "TURNMILL_REDIS_URL": ""}, "redis://fallback"),
        ({"REDIS_URL": "redis://fallback", "TURNMILL_REDIS_URL": "embedded"}, None),
    ],
)
def test_redis_url_has_a_fallback_and_a_word_for_embedded(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings().redis_url == expected
    assert load_settings(redis_url="embedded").redis_url is None


def test_port_falls_back_to_the_platforms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "5000")
    assert load_settings().port == 5000
    monkeypatch.setenv("TURNMILL_PORT", "9000")
    assert load_settings().port == 9000


def test_tokens_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNMILL_API_TOKENS", "first, second,")
    assert load_settings().api_tokens == ("first", "second")


def test_an_option_may_lift_the_expiry_of_sessions() -> None:
    write_file("session_ttl = 60")
    assert load_settings().session_ttl == 60
    assert load_settings(session_ttl="none").session_ttl is None


def test_providers_come_from_tables_of_the_file() -> None:
    write_file('[providers.local]\napi = "openai"\nbase_url = "http://127.0.0.1:8000/v1"\napi_key_env = "LOCAL_KEY"')
    endpoint = load_settings().providers["local"]
    assert (endpoint.api, endpoint.base_url, endpoint.api_key_env) == (
        "openai",
        "http://127.0.0.1:8000/v1",
        "LOCAL_KEY",
    )


def test_a_key_in_place_of_its_variables_name_is_refused_and_not_repeated() -> None:
    write_file('[providers.local]\napi = "openai"\napi_key_env = "sk-secret-123"')
    message = refusal()
    assert "turnmill.toml: providers.local.api_key_env" in message
    assert "sk-secret" not in message


def test_unknown_names_are_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nearest that exists is partitions" in refusal(partition=3)
    write_file("name_space = 'x'")
    assert "nearest that exists is namespace" in refusal()
    write_file('[providers.local]\napi = "openai"\nbase = "x"')
    assert "turnmill.toml: providers.local.base: unknown key; the nearest that exists is base_url" in refusal()
    monkeypatch.setenv("TURNMILL_DRAIN_TIMOUT", "3")
    assert refusal() == (
        "unknown environment variable TURNMILL_DRAIN_TIMOUT; the nearest that exists is TURNMILL_DRAIN_TIMEOUT"
    )


def test_variables_of_the_command_line_and_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kubernetes service named `turnmill` puts its address into every pod under our prefix."""
    for name, value in {
        "TURNMILL_APP": "examples/weather.py",
        "TURNMILL_SERVICE_HOST": "10.0.0.1",
        "TURNMILL_PORT": "tcp://10.0.0.1:8321",
        "TURNMILL_PORT_8321_TCP_ADDR": "10.0.0.1",
        "TURNMILL_GATEWAY_SERVICE_PORT_HTTP": "80",
        "TURNMILL_GATEWAY_PORT": "tcp://10.0.0.1:80",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings().port == 8321


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("partitions", "0", "TURNMILL_PARTITIONS: '0' is not allowed: it must be greater than or equal to 1"),
        ("partitions", "1025", "less than or equal to 1024"),
        ("partitions", "many", "valid integer"),
        ("wire", "xml", "it must be 'json' or 'msgpack'"),
        ("lease_seconds", "0.5", "greater than or equal to 1"),
        ("drain_timeout", "0", "greater than 0"),
        ("drain_timeout", "3600", "less than 3600"),
        ("heartbeat_seconds", "-1", "greater than 0"),
        ("liveness_seconds", "inf", "finite"),
        ("event_ttl", "-1", "greater than 0"),
        ("namespace", "a{b", "TURNMILL_NAMESPACE: 'a{b' is not allowed"),
        ("port", "70000", "65535"),
        ("payload_bytes_max", str(65 * 2**20), "less than or equal to 67108864"),
    ],
)
def test_values_out_of_bounds_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str) -> None:
    monkeypatch.setenv(f"TURNMILL_{name.upper()}", value)
    assert part in refusal()


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ({"heartbeat_seconds": 2}, "heartbeat_seconds (2.0) must be at most a third of liveness_seconds (5.0)"),
        ({"lease_seconds": 1}, "heartbeat_seconds (1.5) must be at most lease_seconds (1.0)"),
        ({"drain_timeout": 60}, "drain_timeout (60.0) must be at least 3 seconds below stop_grace (30.0)"),
        ({"stop_grace": 10}, "drain_timeout (25.0) must be at least 3 seconds below stop_grace (10.0)"),
        ({"blob_threshold": 101, "payload_bytes_max": 100}, "blob_threshold (101) must be at most payload_bytes_max"),
        ({"event_ttl": 100_000}, "event_ttl (100000) must be at most record_ttl (86400)"),
        ({"idempotency_ttl": 100_000}, "idempotency_ttl (100000) must be at most record_ttl (86400)"),
    ],
)
def test_contradictions_are_refused_by_naming_the_rule(overrides: dict[str, object], rule: str) -> None:
    """AC-60."""
    message = refusal(**overrides)
    assert rule in message
    assert "TURNMILL_" in message


def test_contradictions_are_refused_without_load_settings_as_well() -> None:
    with pytest.raises(ConfigurationError, match="at most a third"):
        Settings(heartbeat_seconds=3)


@pytest.mark.parametrize("liveness", [0.3, 0.7, 1.0, 4.5])
def test_exactly_a_third_is_allowed_whatever_floats_say(liveness: float) -> None:
    assert load_settings(liveness_seconds=liveness, heartbeat_seconds=liveness / 3)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pa@ss@host/0", "redis://user:***@host/0"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("unix:///run/valkey.sock?db=1&password=secret", "unix:///run/valkey.sock?db=1&password=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_secrets_are_masked_wherever_settings_are_shown(url: str, shown: str) -> None:
    settings = load_settings(redis_url=url, api_tokens=["token-1"])
    assert settings.redis_url == url
    assert settings.masked()["redis_url"] == shown
    for text in (repr(settings), str(settings)):
        assert shown in text
        assert "secret" not in text
        assert "token-1" not in text


def test_a_refused_url_is_not_repeated() -> None:
    message = refusal(redis_url="http://user:secret@host")
    assert message.startswith("redis_url: a URL that starts with redis://")
    assert "secret" not in message


def test_a_broken_file_is_named() -> None:
    write_file("partitions = ")
    assert refusal().startswith("turnmill.toml cannot be read: ")


def test_it_can_be_told_where_each_value_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    write_file('partitions = 2\n[prices."scripted:x"]\ninput = 1\noutput = 2')
    monkeypatch.setenv("TURNMILL_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("PORT", "5000")
    found = origins(namespace="mine", redis_url=None)
    told = {name: origin for name, origin in found.items() if origin != "default"}
    assert told == {
        "namespace": "option",
        "partitions": "turnmill.toml",
        "prices": "turnmill.toml",
        "max_attempts": "TURNMILL_MAX_ATTEMPTS",
        "port": "PORT",
    }
