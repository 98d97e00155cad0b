"""Predicted over measured as an SVG picture: log axes, the diagonal and a band around it, a colour for each group.

Shared by the benchmarks of memory and of latency. Draws text alone, without a dependency; knows nothing of what is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 640
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 48, 64
# Okabe and Ito: told apart by all.
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)
_STEPS = (1, 2, 5)
_MARGIN = 1.15


@dataclass(frozen=True)
class Point:
    """One measurement and what was predicted for it, both positive and of one unit."""

    label: str
    group: str
    predicted: float
    measured: float


def scatter_svg(points: Sequence[Point], title: str, unit: str, band: float) -> str:
    """`band`: relative width of the grey stripe around the diagonal, 0.03 for +-3 %. Each dot tells its label when
    pointed at. Raises ValueError without points or for a value that has no logarithm.
    """
    if not points:
        raise ValueError("there is no point to draw: measure first")
    values = [value for point in points for value in (point.predicted, point.measured)]
    if min(values) <= 0:
        raise ValueError(f"a value of {min(values):g} has no place on a log axis: all must be positive")
    low, high = min(values) / _MARGIN, max(values) * _MARGIN
    axes = _Axes(low, high)
    groups = list(dict.fromkeys(point.group for point in points))
    colours = {group: _COLOURS[place % len(_COLOURS)] for place, group in enumerate(groups)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 28, title, size=16),
        *_band(axes, band),
        *_grid(axes, unit),
        *(_dot(axes, point, colours[point.group], unit) for point in points),
        *_legend(colours, band),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Axes:
    """The same logarithmic scale both ways."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def x(self, value: float) -> float:
        return _LEFT + self.share(value) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.share(value) * (HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [
            step * 10.0**decade for decade in decades for step in _STEPS if self.low <= step * 10.0**decade <= self.high
        ]


def _band(axes: _Axes, band: float) -> list[str]:
    """Between (1 - band) and (1 + band) times measured, cut at the frame."""
    upper = [(axes.low, axes.low * (1 + band)), (axes.high / (1 + band), axes.high), (axes.high, axes.high)]
    lower = [(axes.high, axes.high * (1 - band)), (axes.low / (1 - band), axes.low), (axes.low, axes.low)]
    corners = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in upper + lower)
    ends = [f"{place(value):.1f}" for value in (axes.low, axes.high) for place in (axes.x, axes.y)]
    return [
        f'<polygon points="{corners}" fill="#e4e4e4"/>',
        f'<line x1="{ends[0]}" y1="{ends[1]}" x2="{ends[2]}" y2="{ends[3]}" stroke="#888"/>',
    ]


def _grid(axes: _Axes, unit: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<path d="M{_LEFT} {_TOP} V{bottom} H{right}" fill="none" stroke="black"/>']
    for tick in axes.ticks():
        x, y = axes.x(tick), axes.y(tick)
        parts += [
            f'<path d="M{x:.1f} {bottom} v5 M{_LEFT} {y:.1f} h-5" stroke="black"/>',
            _text(x, bottom + 20, f"{tick:g}", anchor="middle"),
            _text(_LEFT - 9, y + 4, f"{tick:g}", anchor="end"),
        ]
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 16, f"measured, {unit}", anchor="middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="22" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 22 {middle:.1f})">'
        f"predicted, {escape(unit)}</text>"
    )
    return parts


def _dot(axes: _Axes, point: Point, colour: str, unit: str) -> str:
    error = point.predicted / point.measured - 1
    told = f"{point.label}: predicted {point.predicted:g} {unit}, measured {point.measured:g} {unit} ({error:+.1%})"
    return (
        f'<circle cx="{axes.x(point.measured):.1f}" cy="{axes.y(point.predicted):.1f}" r="4.5" fill="{colour}" '
        f'fill-opacity="0.75"><title>{escape(told)}</title></circle>'
    )


def _legend(colours: dict[str, str], band: float) -> list[str]:
    parts = []
    rows = [_TOP + 14 + 20 * place for place in range(len(colours) + 1)]
    for row, (group, colour) in zip(rows, colours.items(), strict=False):
        parts.append(f'<circle cx="{_LEFT + 18}" cy="{row}" r="4.5" fill="{colour}"/>')
        parts.append(_text(_LEFT + 30, row + 4, group))
    last = rows[-1]
    parts.append(f'<rect x="{_LEFT + 11}" y="{last - 6}" width="14" height="12" fill="#e4e4e4"/>')
    parts.append(_text(_LEFT + 30, last + 4, f"within {band:.0%}"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def curves_svg(
    curves: Mapping[str, Sequence[tuple[float, float]]], marked: Mapping[float, str], title: str, below: str
) -> str:
    """Curves over one logarithmic axis, in a colour each; `marked`: at which x which of them gets a ring. Raises ValueError without points."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        raise ValueError("there is no point to draw: measure first")
    across = _Axes(min(x for x, _ in points) / _MARGIN, max(x for x, _ in points) * _MARGIN)
    low, high = min(y for _, y in points), max(y for _, y in points)
    room = (high - low or 1.0) * 0.1

    def place(x: float, y: float) -> tuple[float, float]:
        share = (y - low + room) / (high - low + 2 * room)
        return across.x(x), HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 28, title, size=15),
        _text(_LEFT, HEIGHT - 12, below),
    ]
    for step in range(6):
        value = low + step * (high - low) / 5
        left, y = place(across.low, value)
        parts += [
            f'<line x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(8, y + 4, f"{value:.3f}"),
        ]
    for x in sorted({x for x, _ in points}):
        parts.append(_text(across.x(x) - 14, HEIGHT - _BOTTOM + 18, f"{x:,.0f}"))
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        placed = [place(x, y) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, value), (left, y) in zip(curve, placed, strict=True):
            chosen = marked.get(x) == name
            ring = f'stroke="{colour}" stroke-width="3" fill="white"' if chosen else f'fill="{colour}"'
            parts.append(
                f'<circle cx="{left:.1f}" cy="{y:.1f}" r="{7 if chosen else 3}" {ring}><title>{escape(name)} {x:,.0f}: {value:.3f}</title></circle>'
            )
        number = list(curves).index(name)
        parts.append(f'<rect x="{WIDTH - 190}" y="{_TOP + 18 * number}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(WIDTH - 172, _TOP + 11 + 18 * number, name))
    return "\n".join([*parts, "</svg>"]) + "\n"
