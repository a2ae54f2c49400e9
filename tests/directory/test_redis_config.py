from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from directory import RedisConfig
from protocol import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("valkey://host:7000/3", "redis://host:7000/3"),
        ("rediss://host", "rediss://host:6379/0"),
        ("valkeys://user:pw@host:1/", "rediss://host:1/0"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("unix://:pw@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(RedisConfig(url).address) == shown


def test_a_user_and_a_password_in_the_url() -> None:
    address = RedisConfig("redis://me:p%40ss%2F@host").address
    assert (address.username, address.password) == ("me", "p@ss/")


def test_a_password_of_its_own() -> None:
    assert RedisConfig("redis://me@host", password="p@ss/").address.password == "p@ss/"


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"url": "host:6379"}, "url", "must begin with"),
        ({"url": "http://host"}, "url", "must begin with"),
        ({"url": "redis://"}, "url", "names no host"),
        ({"url": f"redis://:{SECRET}/x@host"}, "url", "cannot be read"),
        ({"url": f"redis://:{SECRET}@host:99999"}, "url", "cannot be read"),
        ({"url": f"redis://:{SECRET}@host/x"}, "url", "number of a database"),
        ({"url": f"redis://:{SECRET}@host/0?a=b"}, "url", "nothing behind"),
        ({"url": f"unix://{SECRET}/path"}, "url", "three slashes"),
        ({"url": "unix:///"}, "url", "names no socket"),
        ({"url": f"redis://:{SECRET}@host", "password": SECRET}, "password", "given twice"),
        ({"password": ""}, "password", "is empty"),
        ({"key_prefix": ""}, "key_prefix", "must have"),
        ({"key_prefix": "a{b}"}, "key_prefix", "must have"),
        ({"tls_ca": "/none"}, "tls_ca", "rediss://"),
        ({"url": "rediss://host", "tls_ca": "/none"}, "tls_ca", "no file /none"),
        ({"url": "rediss://host", "tls_cert": __file__}, "tls_key", "go together"),
        ({"url": "rediss://host", "tls_key": __file__}, "tls_cert", "go together"),
        ({"io_timeout_s": 0}, "io_timeout_s", "above 0"),
        ({"event_interval_s": float("nan")}, "event_interval_s", "above 0"),
        ({"max_stream_entries": 0}, "max_stream_entries", "at least 1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisConfig(**{"url": "redis://host", **settings})
    assert caught.value.field == field
    assert words in caught.value.problem
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_secret_is_shown(tmp_path: Path) -> None:
    for config in (
        RedisConfig(f"redis://:{SECRET}@host"),
        RedisConfig("redis://host", password=SECRET),
    ):
        assert SECRET not in f"{config!r} {config} {config.address!r} {config.address}"
