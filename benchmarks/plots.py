"""Plots as SVG: bars, and lines on logarithmic axes. To draw them needs no package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from tables import LIMIT_PREFIX, OURS, number

GREEN, GREY, AMBER = "#2a9d63", "#8c96a3", "#d29922"
OTHERS = (GREY, "#4f7cac", AMBER, "#a4548b")
CHARACTER = 7  # width of a character of a label in px, with room for wide fonts
STYLE = "<style>text{fill:#1f2328}@media(prefers-color-scheme:dark){text{fill:#e6edf3}}</style>"


def bars(heading: str, values: Sequence[tuple[str, float]], unit: str) -> str:
    """A plot of horizontal bars on a linear axis from zero.

    Args:
        heading: Written above the bars.
        values: Name and value of each bar, top to bottom; ours and limits stand out by colour.
        unit: Written after each value.

    """
    row, top = 26, 40
    left = max(290, CHARACTER * max(len(name) for name, _ in values) + 16)
    width = left + 470
    longest = max(value for _, value in values)
    scale = (width - left - 110) / longest
    out = _begin(heading, width, top + row * len(values) + 10)
    for index, (name, value) in enumerate(values):
        y = top + row * index
        is_limit = name.startswith(LIMIT_PREFIX)
        colour = GREEN if name.startswith(OURS) else AMBER if is_limit else GREY
        length = max(1.0, value * scale)
        out += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{number(value)} {escape(unit)}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def lines(
    heading: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    upwards: str,
) -> str:
    """A plot of curves on two logarithmic axes, with a line for each power of ten.

    Args:
        heading: Written above.
        curves: By name, points with both coordinates above zero; ours stands out by colour.
        across: What the horizontal axis is.
        upwards: What the vertical axis is.

    """
    width, height, left, right, top, bottom = 820, 420, 90, 300, 60, 50
    points = [point for curve in curves.values() for point in curve]
    x_first, x_last = _decades([x for x, _ in points])
    y_first, y_last = _decades([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log10(x) - x_first) / (x_last - x_first)
        up = (math.log10(y) - y_first) / (y_last - y_first)
        return left + along * (width - left - right), height - bottom - up * (height - top - bottom)

    out = _begin(heading, width, height)
    for power in range(x_first, x_last + 1):
        (x, y) = place(10.0**power, 10.0**y_first)
        out += [
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y:.1f}" {_thin()}/>',
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{_power(power)}</text>',
        ]
    for power in range(y_first, y_last + 1):
        (x, y) = place(10.0**x_first, 10.0**power)
        out += [
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" {_thin()}/>',
            f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{_power(power)}</text>',
        ]
    middle = (left + width - right) / 2
    out += [
        f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{escape(across)}</text>',
        f'<text x="8" y="{top - 12}">{escape(upwards)}</text>',
    ]
    others = iter(OTHERS * len(curves))
    for index, (name, curve) in enumerate(curves.items()):
        colour = GREEN if name.startswith(OURS) else next(others)
        places = [place(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = top + 24 * index
        out += [
            f'<rect x="{width - right + 12}" y="{y}" width="14" height="14" fill="{colour}"/>',
            f'<text x="{width - right + 32}" y="{y + 12}">{escape(name)}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def _begin(heading: str, width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        STYLE,
        f'<text x="8" y="22" font-size="15" font-weight="bold">{escape(heading)}</text>',
    ]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values, at least one apart."""
    first = math.floor(math.log10(min(values)))
    return first, max(first + 1, math.ceil(math.log10(max(values))))


def _power(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def _thin() -> str:
    return f'stroke="{GREY}" stroke-opacity="0.4"'
