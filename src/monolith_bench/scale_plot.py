"""A picture of how a job scales, as SVG, written by hand: no package is needed to draw lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 340
_LEFT, _TOP, _RIGHT, _BOTTOM = 66, 44, 16, 92
_COLOURS = ("#0f766e", "#b45309", "#1d4ed8", "#be123c", "#6b7280")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """Both above 0: both axes are logarithmic."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    across: str
    up: str
    lines: Sequence[Line]


def draw(panels: Sequence[Panel], note: str) -> str:
    """Return an SVG with panels next to each other, over a line of text."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 24}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT + 24}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH} 0)">')
        parts += _panel(panel)
        parts.append("</g>")
    parts.append(_text(12, HEIGHT + 12, note, size=11, colour="#6b7280"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    least_x, most_x = _decades([x for x, _ in points])
    least_y, most_y = _decades([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - least_x) / (most_x - least_x)
        up = (math.log10(y) - least_y) / (most_y - least_y)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_text(_LEFT, 24, panel.title, size=14, weight="bold")]
    for power in range(least_x, most_x + 1):
        x, bottom = place(10.0**power, 10.0**least_y)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(x, bottom + 16, _power(power), anchor="middle"))
    for power in range(least_y, most_y + 1):
        left, y = place(10.0**least_x, 10.0**power)
        right = WIDTH - _RIGHT
        parts.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(left - 6, y + 4, _power(power), anchor="end"))
    parts.append(_text(_LEFT, 39, panel.up, size=11, colour="#6b7280"))
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - _BOTTOM + 32, panel.across, anchor="end", colour="#6b7280"))
    for number, line in enumerate(panel.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = _LEFT + 190 * (number % 2), HEIGHT - _BOTTOM + 52 + 18 * (number // 2)
        key = f'x1="{x}" y1="{y - 4}" x2="{x + 20}" y2="{y - 4}"'
        parts.append(f'<line {key} stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(_text(x + 26, y, line.name, size=11))
    return parts


def _decades(values: Sequence[float]) -> tuple[int, int]:
    least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return least, max(most, least + 1)


def _power(power: int) -> str:
    names = {
        0: "1",
        1: "10",
        2: "100",
        3: "1 k",
        4: "10 k",
        5: "100 k",
        6: "1 M",
        7: "10 M",
        8: "100 M",
        9: "1 G",
    }
    return names.get(power, f"{10.0**power:g}")


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    colour: str = "#111827",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
