"""A plan as a picture (SVG): devices x layers coloured by precision, above the timeline of both phases' micro-batches.

Called by `strata plan --picture`. What a reader should see at once: who holds what at how many bits, how full each device
is, and where stages wait for each other. Knows no search.
"""

from xml.etree.ElementTree import Element, SubElement, tostring

from strata_planner.answer.timeline import Work, busy_share, decode_timeline, prefill_timeline
from strata_planner.contract.plan import Plan, Replica, Stage
from strata_planner.contract.shares import lowest, told
from strata_planner.units import human_bytes

_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 1120.0, 230.0, 170.0, 26.0, 34.0
_FONT = "font-family:system-ui,sans-serif"
# Dark is fine, light is coarse; readable without colour vision (from Wong, Nature Methods 8, 2011).
OF_BITS = {
    16: "#0b3c5d", 8: "#0072b2", 7: "#3a93bf", 6: "#6fb1a0", 5: "#b3b45a", 4: "#e69f00", 3: "#f0e442", 2: "#f7f3b0",
}  # fmt: skip
_OF_BATCH = ("#0072b2", "#56b4e9", "#009e73", "#8fd1bd", "#cc79a7", "#e3b5d0", "#d55e00", "#eea475")
_IDLE, _INK, _QUIET = "#eceff1", "#1b1f23", "#57606a"
_MOST_BATCHES, _ROUNDS = 8, 2


def picture(plan: Plan) -> str:
    """The SVG's text."""
    drawing = _Drawing(plan)
    drawing.title()
    for replica in plan.replicas:
        drawing.layers(replica)
        drawing.timelines(replica)
    return drawing.text()


class _Drawing:
    """Draws from top to bottom; `_y` is the edge of what is drawn."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._svg = Element("svg", xmlns="http://www.w3.org/2000/svg", style=_FONT)
        self._background = SubElement(self._svg, "rect", x="0", y="0", width="100%", height="100%", fill="white")
        self._y = 30.0

    def text(self) -> str:
        self._svg.set("viewBox", f"0 0 {_WIDTH:g} {self._y:g}")
        self._svg.set("width", f"{_WIDTH:g}")
        return tostring(self._svg, encoding="unicode") + "\n"

    def title(self) -> None:
        plan, predicted = self._plan, self._plan.prediction
        rate = f"{predicted.tokens_per_second:.4g} tokens/s"
        goal = rate if plan.objective is None else plan.objective.said()
        self._write(16, f"{plan.architecture}, {plan.num_layers} layers: {goal}", 17)
        self._y += 20
        self._write(
            16,
            f"{f'{rate}, ' * (goal != rate)}first token {predicted.ttft_ms:.4g} ms, then {predicted.tpot_ms:.4g} ms per token (predicted); bound by "
            f"{predicted.bound_by}",
            12,
            _QUIET,
        )
        self._y += 16

    def layers(self, replica: Replica) -> None:
        """A row per stage: its layers where they lie in the model, and how full its devices are."""
        self._heading(
            f"replica {replica.replica}: layers and bits" if len(self._plan.replicas) > 1 else "layers and bits"
        )
        self._legend({bits for stage in replica.stages for bits in stage.bits})
        width = self._span() / self._plan.num_layers
        for stage in replica.stages:
            self._label(stage)
            self._box(_LEFT, self._span(), _IDLE)
            for layer, bits in enumerate(stage.bits, stage.layers[0]):
                box = self._box(_LEFT + layer * width, max(width - 0.8, 0.5), OF_BITS.get(bits, _QUIET))
                SubElement(box, "title").text = f"layer {layer}: {bits} bits ({stage.format[layer - stage.layers[0]]})"
            self._fullness(stage)
            self._y += _ROW

    def timelines(self, replica: Replica) -> None:
        """A round of steps that carry prompts, then the first rounds of steps that only decode."""
        batch = replica.micro_batch
        chunk = f"steps with prompts, up to {batch.max_step_tokens - batch.decode} tokens of them"
        for name, size, rounds in ((chunk, batch.decode, 1), ("decode", batch.decode, _ROUNDS)):
            count = min(batch.under_way(len(replica.stages)), -(-replica.concurrency // size))
            shown = min(count, _MOST_BATCHES)
            work = prefill_timeline(replica, shown) if rounds == 1 else decode_timeline(replica, shown, rounds)
            some = f" (the first {shown} of {count})" if shown < count else ""
            span = max(each.end for each in work)
            what = f"{name}: {shown} micro-batches of {size}{some}" + (f", {rounds} tokens each" if rounds > 1 else "")
            self._heading(f"{what}, {span * 1e3:.4g} ms; grey is waiting")
            for stage in replica.stages:
                self._working(stage, [each for each in work if each.stage == stage.stage], span)
                self._write(
                    _LEFT + self._span() + 10, f"{busy_share(work, stage.stage):.0%} busy", 12, _QUIET, below=17
                )
                self._y += _ROW

    def _working(self, stage: Stage, work: list[Work], span: float) -> None:
        self._label(stage)
        self._box(_LEFT, self._span(), _IDLE)
        for each in work:
            left = _LEFT + each.start / span * self._span()
            width = max((each.end - each.start) / span * self._span() - 0.6, 0.4)
            box = self._box(left, width, _OF_BATCH[each.micro_batch % len(_OF_BATCH)])
            seconds = (each.end - each.start) * 1e3
            SubElement(box, "title").text = f"micro-batch {each.micro_batch}, token {each.round}: {seconds:.4g} ms"

    def _fullness(self, stage: Stage) -> None:
        """A small bar: predicted memory of usable."""
        memory, device = stage.fullest
        share, left, width = memory.total_bytes / device.usable_bytes, _LEFT + self._span() + 10, 46.0
        self._box(left, width, _IDLE)
        self._box(left, width * min(share, 1.0), _QUIET)
        self._write(left + width + 6, f"{share:.0%} of {human_bytes(device.usable_bytes)}", 11, _QUIET, below=17)

    def _legend(self, bits: set[int]) -> None:
        left = _WIDTH - _RIGHT - 70.0 * len(bits)
        for each in sorted(bits, reverse=True):
            attributes = {"x": f"{left:g}", "y": f"{self._y - 26:g}", "width": "14", "height": "14"}
            SubElement(self._svg, "rect", attributes, fill=OF_BITS.get(each, _QUIET))
            self._write(left + 19, f"{each} bits", 12, below=-14)
            left += 70

    def _label(self, stage: Stage) -> None:
        first = stage.devices[0]
        device = f"{len(stage.devices)} x {first.type}" if len(stage.devices) > 1 else f"{first.type} #{first.index}"
        device += f" ({told(stage.shares)})" if lowest(stage.shares) else ""
        self._write(16, _short(f"{stage.stage}  {device} on {stage.node}"), 12, below=17)

    def _heading(self, what: str) -> None:
        self._y += _GAP
        self._write(16, what, 13, below=-14)

    def _span(self) -> float:
        return _WIDTH - _LEFT - _RIGHT

    def _box(self, left: float, width: float, fill: str) -> Element:
        place = {"x": f"{left:.2f}", "y": f"{self._y:g}", "width": f"{width:.2f}", "height": f"{_ROW - 5:g}"}
        return SubElement(self._svg, "rect", place, fill=fill)

    def _write(self, left: float, what: str, size: int, fill: str = _INK, below: float = 0.0) -> None:
        place = {"x": f"{left:g}", "y": f"{self._y + below:g}", "font-size": str(size)}
        SubElement(self._svg, "text", place, fill=fill).text = what


def _short(label: str, most: int = 34) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"
