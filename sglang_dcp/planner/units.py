"""Numbers with units, in and out: "1M" -> 1_000_000, 27_648_000_000 -> "27.6 GB".

K, M, G, T are powers of 1000 and Ki, Mi, Gi, Ti powers of 1024, for tokens and for bytes alike.
"""

from __future__ import annotations

import re
from decimal import Decimal

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_FACTORS = _DECIMAL | _BINARY
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)")
_RULE = "a number with an optional suffix K, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024)"


def parse_count(text: str, option: str, unit: str = "tokens") -> int:
    """Read a positive whole number such as "1M", "128k", "128Ki", "1.5M" or "1_000_000".

    Args:
        text: what the user wrote.
        option: the option it was written for; only names it in the message.
        unit: what is counted; only names it in the message.

    Raises:
        ValueError: not a number, an unknown suffix, not whole, or below 1.
    """
    value = _parse(text, option, unit, "1M, 128K or 128Ki", strip_unit="")
    if value != int(value):
        raise ValueError(
            f"{option} {text} is {value} {unit}: {unit} are whole numbers. "
            f"Write {option} {int(value)} or {int(value) + 1}."
        )
    if value < 1:
        raise ValueError(
            f"{option} {text} asks for {value} {unit}: it must be at least 1. "
            f"Write {option} 1 or more."
        )
    return int(value)


def parse_bytes(text: str, option: str) -> int:
    """Read a number of bytes such as "689G", "689GB" or "640GiB"; 0 is allowed.

    Raises:
        ValueError: not a number of bytes.
    """
    return int(_parse(text, option, "bytes", "689G or 640GiB", strip_unit="B"))


def _parse(text: str, option: str, unit: str, examples: str, strip_unit: str) -> Decimal:
    match = _NUMBER.fullmatch(text.strip())
    suffix = match.group(2).upper() if match else None
    if suffix and strip_unit:
        suffix = suffix.removesuffix(strip_unit)
    if match is None or suffix not in _FACTORS:
        raise ValueError(
            f"{option} {text} is not a number of {unit}: give {_RULE}. "
            f"Write for example {examples}."
        )
    return Decimal(match.group(1).replace("_", "")) * _FACTORS[suffix]


def format_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit: 1152 -> "1,152 B", 27_648_000_000 -> "27.6 GB"."""
    if abs(num_bytes) < 10_000:
        return f"{num_bytes:,.0f} B"
    return _scaled(num_bytes, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")))


def format_count(count: float) -> str:
    """Three digits and a decimal suffix: 1_000_000 -> "1M", 553_984 -> "554K"."""
    if abs(count) < 1000:
        return f"{count:,.0f}"
    return _scaled(count, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")))


def format_capacity(count: int) -> str:
    """As `format_count`, but never more than there is: 592_999 -> "592K"."""
    step = 10 ** max(0, len(str(count)) - 3)
    return format_count(count // step * step)


def format_ms(value_ms: float) -> str:
    """Milliseconds with three digits, microseconds below 0.1 ms, seconds from 10 s."""
    if value_ms >= 10_000:
        return f"{_digits(value_ms / 1e3)} s"
    if value_ms < 0.1:
        return f"{value_ms * 1e3:.3g} us"
    return f"{_digits(value_ms)} ms"


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    for scale, suffix in scales:
        # 0.9995 so that 999_900 reads 1M and not 1000K
        if abs(value) >= scale * 0.9995:
            return _digits(value / scale) + suffix
    return _digits(value)


def _digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
