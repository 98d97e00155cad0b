"""One loss as a picture (SVG): the bits of every layer before, during and after, above every token of every stream by its time. Used by `benchmarks.loss`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.elastic import Seconds
from strata_planner.answer.picture import OF_BITS
from strata_planner.contract.plan import Plan

_WIDTH, _LEFT, _RIGHT, _ROW = 1120.0, 210.0, 30.0, 26.0
_INK, _QUIET, _LINE, _TOKEN, _GONE = "#1b1f23", "#57606a", "#c9d1d9", "#0072b2", "#d55e00"
_BEFORE_SECONDS, _AFTER_SECONDS = 0.6, 0.8  # that are shown: before the kill, and behind the last stream's next token
_PHASES = ("three slots", "one is lost", "it is back")
_STEPS_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Loss:
    """`plans`, `perplexities`: before the loss, while the neighbours serve, and with the slot back. `moments`: of each stream, seconds from the kill to each token."""

    plans: tuple[Plan, Plan, Plan]
    perplexities: tuple[float, float, float]
    victim: str
    seconds: Seconds
    moments: Mapping[str, tuple[float, ...]]
    lost: int
    doubled: int

    def mean_bits(self, phase: int) -> float:
        bits = [each for stage in self.plans[phase].replicas[0].stages for each in stage.bits]
        return sum(bits) / len(bits)


def loss_svg(loss: Loss) -> str:
    """The SVG's text."""
    parts: list[str] = []
    bottom = _times(parts, loss, _layers(parts, loss))
    size = f'viewBox="0 0 {_WIDTH:g} {bottom:g}" width="{_WIDTH:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="font-family:system-ui,sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _layers(parts: list[str], loss: Loss) -> float:
    """A row of layers for each phase, grouped by the slots that hold them; its lower edge."""
    _write(parts, 16, 30, "A slot is killed: its neighbours take its layers over, at fewer bits", 17)
    bits = sorted({each for plan in loss.plans for stage in plan.replicas[0].stages for each in stage.bits})
    for place, each in enumerate(reversed(bits)):
        left = _WIDTH - _RIGHT - 70.0 * (len(bits) - place)
        _box(parts, left, 44, 14, 14, OF_BITS[each])
        _write(parts, left + 19, 56, f"{each} bits", 12)
    top = 70.0
    for phase, plan, perplexity in zip(_PHASES, loss.plans, loss.perplexities, strict=True):
        _write(parts, 16, top + 17, f"{phase}: perplexity {perplexity:.2f}", 12)
        left, gap = _LEFT, 8.0
        stages = plan.replicas[0].stages
        width = (_WIDTH - _LEFT - _RIGHT - gap * (len(stages) - 1)) / plan.num_layers
        for stage in stages:
            for each in stage.bits:
                _box(parts, left, top, width - 1.5, _ROW - 5, OF_BITS[each])
                left += width
            left += gap
        top += _ROW
    return top


def _times(parts: list[str], loss: Loss, top: float) -> float:
    """A row of ticks for each stream, and lines for what happened; its lower edge."""
    seconds = loss.seconds
    begin, end = -_BEFORE_SECONDS, seconds.last + _AFTER_SECONDS
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    events = {
        "killed": 0.0,
        "noticed": seconds.noticed,
        "repair planned": seconds.planned,
        "prepared": seconds.prepared,
        "in force": seconds.committed,
        "next token": seconds.first,
        "every stream": seconds.last,
    }
    top += 30.0
    _write(parts, 16, top, "every token of every stream", 13)
    rows = top + 16.0 * len(events)
    bottom = rows + 10.0 + _ROW * len(loss.moments)
    for place, (name, at) in enumerate(events.items()):
        x, y = _LEFT + (at - begin) * scale, top + 16.0 * place
        colour = _GONE if name == "killed" else _QUIET
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:g}" y2="{bottom:g}" stroke="{colour}" stroke-width="1"/>'
        )
        _write(parts, x + 5, y, f"{name} {at:.2f} s" if at else name, 12, colour)
    for place, (name, came) in enumerate(loss.moments.items()):
        y = rows + 10.0 + _ROW * place
        _write(parts, 16, y + 14, f"stream {name.removeprefix('s')}", 12)
        for at in came:
            if begin <= at <= end:
                _box(parts, _LEFT + (at - begin) * scale, y, 1.6, _ROW - 8, _TOKEN)
    step = next(each for each in _STEPS_SECONDS if (end - begin) / each <= 12)
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        x = _LEFT + (number * step - begin) * scale
        _box(parts, x, bottom, 1, 5, _LINE)
        _write(parts, x - 8, bottom + 19, f"{number * step:g} s", 11, _QUIET)
    return bottom + 32.0


def _box(parts: list[str], left: float, top: float, width: float, height: float, fill: str) -> None:
    place = f'x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"'
    parts.append(f'<rect {place} fill="{fill}"/>')


def _write(parts: list[str], left: float, top: float, what: str, size: int, fill: str = _INK) -> None:
    parts.append(f'<text x="{left:.1f}" y="{top:g}" font-size="{size}" fill="{fill}">{escape(what)}</text>')
