"""The section `server`: what it takes, sections within sections, and keys of clients that nobody is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.config.loader import ConfigError, TextValue, load_config

if TYPE_CHECKING:
    from pathlib import Path


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(f"model: demo\n{text}", encoding="utf-8")
    return path


def test_defaults():
    server = load_config("demo").server
    assert (server.host, server.port, server.insecure, server.request_timeout) == (
        "127.0.0.1",
        8000,
        False,
        None,
    )
    assert (server.max_queue, server.drain_seconds, server.heartbeat_seconds) == (1024, 30, 10)
    limits = server.limits
    assert (limits.body_bytes, limits.header_bytes) == (16 * 2**20, 32 * 2**10)
    assert (limits.n, limits.logprobs, limits.stop, limits.stop_bytes) == (128, 20, 16, 256)
    assert limits.schema_bytes == 64 * 2**10


def test_a_section_in_a_section_however_it_is_written(tmp_path):
    file = write(tmp_path, "server:\n  port: 1\n  limits:\n    n: 3\n    body_bytes: 1MiB\n")
    from_file = load_config(file=file)
    nested = load_config("demo", overrides={"server": {"port": 1, "limits": {"n": 3, "body_bytes": 2**20}}})
    dotted = load_config("demo", overrides={"port": 1, "server.limits.n": 3, "body_bytes": TextValue("1MiB")})
    assert from_file == nested == dotted
    assert (dotted.server.port, dotted.server.limits.n) == (1, 3)


def test_options_win_over_one_key_of_a_nested_section(tmp_path):
    file = write(tmp_path, "server:\n  limits:\n    n: 3\n    stop: 5\n")
    limits = load_config(None, file, {"server.limits.n": TextValue("4")}).server.limits
    assert (limits.n, limits.stop) == (4, 5)


@pytest.mark.parametrize("text", ["server:\n", "server:\n  limits:\n"])
def test_a_section_may_be_empty(tmp_path, text):
    assert load_config(file=write(tmp_path, text)) == load_config("demo")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "server:\n  limits:\n    m: 3\n",
            4,
            "unknown key 'server.limits.m' (value 3); valid keys of server.limits",
        ),
        ("server:\n  limits:\n    stopp: 3\n", 4, "did you mean 'server.limits.stop'?"),
        ("server:\n  limits: 3\n", 3, "server.limits: 3 is not a set of keys"),
        ("server:\n  limits:\n    n: 129\n", 4, "server.limits.n: 129: should be less than or equal to 128"),
        ("server:\n  limits:\n    body_bytes: 1XB\n", 4, "server.limits.body_bytes: '1XB': a size is"),
        ("server:\n  port: 65536\n", 3, "server.port: 65536"),
        ("server:\n  request_timeout: 0\n", 3, "server.request_timeout: 0"),
        ("server:\n  cors_origins: [example.com]\n", 3, "an origin is http://host[:port]"),
        ("server:\n  allowed_hosts: ['a:1']\n", 3, "a host is a name or an address without a port"),
        ("server:\n  api_keys: ['a b']\n", 3, "server.api_keys: not shown: a key is printable ASCII"),
        ("server:\n  api_keys: ['']\n", 3, "server.api_keys: not shown: a key is printable ASCII"),
        ("server:\n  insecure: 1\n", 3, "server.insecure: 1: should be a valid boolean"),
    ],
)
def test_mistakes_name_the_line_and_the_key(tmp_path, text, line, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(file=path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert message in str(error.value)


def test_keys_come_from_the_environment_and_are_never_shown(tmp_path, monkeypatch):
    file = write(tmp_path, "server:\n  api_keys: ['${HYBRIDSERVE_TEST_KEY}', other]\n")
    with pytest.raises(ConfigError, match="HYBRIDSERVE_TEST_KEY is not set") as error:
        load_config(file=file)
    assert "other" not in str(error.value)
    monkeypatch.setenv("HYBRIDSERVE_TEST_KEY", "sk-1")
    config = load_config(file=file)
    assert [key.get_secret_value() for key in config.server.api_keys] == ["sk-1", "other"]
    assert "sk-1" not in repr(config)
    assert "sk-1" not in config.model_dump_json()


def test_lists_on_a_command_line():
    overrides = {"api_keys": TextValue("a, b"), "allowed_hosts": TextValue("X.y,[::1]")}
    server = load_config("demo", overrides=overrides).server
    assert [key.get_secret_value() for key in server.api_keys] == ["a", "b"]
    assert server.allowed_hosts == ("x.y", "[::1]")


def test_no_adapter_has_the_served_name():
    with pytest.raises(ConfigError, match=r"lora.adapters.tiny: is a name of the base model"):
        load_config("demo", overrides={"served_name": "tiny", "lora.adapters": {"tiny": "x"}})
