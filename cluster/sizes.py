"""Sizes as people write them: 512MiB, 1.5GiB, 2GB, 1000000."""

from __future__ import annotations

import re
from fractions import Fraction

from protocol import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_PATTERN = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def parse_size(field: str, text: str) -> int:
    """Bytes. Raises ConfigError: not a size."""
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(field, f"{text!r} is not a size; write it like 512MiB, 1.5GiB or 2GB")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: int) -> str:
    """The largest binary unit that leaves at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
