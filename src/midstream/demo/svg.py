"""Line charts as inline SVG, without a library, a script or a download. Pure.

Always holds: every label is escaped. A value that is not finite is left out of its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")


@dataclass(frozen=True)
class Line:
    """values: at x = 1, 2, ... errors: the half-width of a band around the line, for each value."""

    name: str
    values: Sequence[float]
    errors: Sequence[float] = ()


def line_chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False) -> str:
    """One chart over steps. log: a decimal logarithmic y axis, which leaves out values at or below 0."""
    shown = [v for line in lines for v in line.values if _shows(v, log)]
    count = max((len(line.values) for line in lines), default=0)
    low, high, ticks = (_log_axis if log else _linear_axis)(shown or [1.0])

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i / max(count - 1, 1))

    def y(value: float) -> float:
        at = math.log10(value) if log else value
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(max(at, low), high) - low) / (high - low))

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for tick in ticks:
        value = 10.0**tick if log else tick
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    parts.extend(
        f'<text class="tick" x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{i + 1}</text>'
        for i in range(0, count, max(1, math.ceil(count / 10)))
    )
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step, y: {escape(unit)}</text>'
    )
    for line, color in zip(lines, COLORS, strict=False):
        points = [(x(i), y(v), v, i) for i, v in enumerate(line.values) if _shows(v, log)]
        parts.append(_band(line, color, x, y))
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.extend(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.4" fill="{color}">'
            f"<title>{escape(line.name)}, step {i + 1}: {v:.4g}</title></circle>"
            for px, py, v, i in points
        )
    parts.append(_legend(lines))
    return "".join(parts) + "</svg>"


def _shows(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _band(line: Line, color: str, x: object, y: object) -> str:
    if not line.errors:
        return ""
    assert callable(x)
    assert callable(y)
    upper = [(x(i), y(v + e)) for i, (v, e) in enumerate(zip(line.values, line.errors, strict=True))]
    lower = [(x(i), y(v - e)) for i, (v, e) in enumerate(zip(line.values, line.errors, strict=True))]
    outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*upper, *reversed(lower)])
    return f'<polygon points="{outline}" fill="{color}" opacity="0.18"/>'


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    parts, at = [], float(LEFT)
    for line, color in zip(lines, COLORS, strict=False):
        parts.append(f'<rect x="{at:.0f}" y="{HEIGHT - 15}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text class="tick" x="{at + 14:.0f}" y="{HEIGHT - 6}">{escape(line.name)}</text>')
        at += 26 + 6.2 * len(line.name)
    return "".join(parts)


def _linear_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """From 0 or below to a round number above the largest value, with about five ticks."""
    low, high = min(0.0, *values), max(values)
    if high <= low:
        high = low + 1.0
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return first * step, last * step, [i * step for i in range(first, last + 1)]


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Whole decades around the values. Ticks are exponents."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return float(low), float(high), [float(e) for e in range(low, high + 1)]
