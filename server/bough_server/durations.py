"""Durations as people write them, such as "10m", "50ms" and "1h30m"; calendars and clocks are not its business."""

import re
from decimal import Decimal
from typing import Final

_UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_PIECE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(ns|us|ms|s|m|h|d)")
_WHOLE: Final = re.compile(rf"-?(?:{_PIECE.pattern})+")
_LONGEST_NS: Final = 315_576_000_000 * 1_000_000_000
"""Ten thousand years: what google.protobuf.Duration may hold."""


def parse_duration(text: str) -> int:
    """Nanoseconds of a text such as "10m", "1.5s" or "1h30m". Raises ValueError with a sentence."""
    text = text.strip()
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"must be a duration such as 10m, 50ms or 1h30m, not {text[:40]!r}")
    nanoseconds = sum(int(Decimal(number) * _UNITS[unit]) for number, unit in _PIECE.findall(text))
    if nanoseconds > _LONGEST_NS:
        raise ValueError("must be a duration of at most ten thousand years")
    return -nanoseconds if text.startswith("-") else nanoseconds
