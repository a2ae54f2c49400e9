"""Sizes as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sizes import format_size, parse_size
from protocol import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("0", 0),
        ("1000000", 1_000_000),
        ("5B", 5),
        ("2KB", 2000),
        ("2k", 2000),
        ("2KiB", 2048),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("512Mi", 512 << 20),
        (" 512 MiB ", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2_000_000_000),
        ("0.5T", 500_000_000_000),
        ("1TiB", 1 << 40),
        ("0.1KB", 100),
        ("999999999999999999", 999_999_999_999_999_999),
    ],
)
def test_parse(text: str, num_bytes: int) -> None:
    assert parse_size("kv-memory", text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GiB", "-1GiB", "+1", "1e9", "1,5GiB", "1.GiB", ".5GiB", "1PiB", "1 i", "1iB"),
        *("lots", "1GiBB", "1 2", "inf", "nan", "0x10", "9" * 400),
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_size("kv-memory", text)
    assert error.value.field == "kv-memory"
    assert "512MiB" in error.value.problem, "an example helps"


@given(st.text(alphabet="0123456789.kKmMgGtTiIbB -+e", max_size=12))
def test_any_text_is_a_size_or_is_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_size("kv-memory", text) >= 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (737_280, "720 KiB"),
        (512 << 20, "512 MiB"),
        (3 << 29, "1.5 GiB"),
        (100 << 40, "100 TiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_is_printed_can_be_typed(num_bytes: int) -> None:
    again = parse_size("kv-memory", format_size(num_bytes))
    assert abs(again - num_bytes) <= num_bytes * 1e-3
