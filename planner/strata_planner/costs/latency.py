"""Seconds of a layer, of the head and of a step: which source answers.

Asked by the search for every kind of device. Sources are asked in order of trust; the roofline answers what none of them
knows, and every answer carries its source's name, so that a plan can say where its numbers are from.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from strata_planner.contract.formats import FormatName
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.source import LatencySource, Phase, Rates, Timed
from strata_planner.question.model import LayerShape, Model


@dataclass(frozen=True)
class Latencies:
    """`sources`: in order of trust, the roofline not among them."""

    sources: tuple[LatencySource, ...] = ()

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed:
        """The format must be one that the device runs."""
        return _first(each.layer(layer, format_name, rates, phase) for each in (*self.sources, Roofline()))

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed:
        return _first(each.head(model, rates, sequences) for each in (*self.sources, Roofline()))

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed:
        return _first(each.step(model, rates, phase) for each in (*self.sources, Roofline()))


def _first(answers: Iterable[Timed | None]) -> Timed:
    return next(answer for answer in answers if answer is not None)
