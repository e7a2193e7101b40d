"""How figures are written, the same in every table, plot and sentence."""

from __future__ import annotations

MEBIBYTE = 2**20
SPREAD_DASH = "–"


def milliseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.1f}"


def per_second(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def mebibytes(value_bytes: float) -> str:
    value = value_bytes / MEBIBYTE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def percent(fraction: float) -> str:
    """One decimal, without a sign for what is positive; never "-0.0 %"."""
    return f"{_percent(fraction):.1f} %"


def signed_percent(fraction: float) -> str:
    value = _percent(fraction)
    return f"{value:+.1f} %" if value else "0.0 %"


def _percent(fraction: float) -> float:
    # Adding 0.0 turns the -0.0 that rounding leaves into 0.0.
    return round(fraction * 100.0, 1) + 0.0


def loss(value: float) -> str:
    return f"{value:.4f}"


def gap(value: float) -> str:
    """A difference of two losses; one that is exactly nothing is told so."""
    return f"{value:.1e}" if value else "0"


def parameters(count: int | None) -> str:
    if count is None:
        return ""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)
