"""Seconds of one layer in the parts that steps are made of: rows that see nothing, decoding sequences, chunks' attention.

Made by `pricing` once per kind of layer and device. Sources that price mixed steps themselves are asked for steps, all others
for micro-batches of one phase. Answers are remembered.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol, runtime_checkable

from strata_planner.contract.formats import FormatName
from strata_planner.costs.latency import Latencies
from strata_planner.costs.source import Phase, Rates
from strata_planner.model import LayerShape


class StepPart(NamedTuple):
    """`sequences` with `tokens` new tokens each after `past` cached ones."""

    sequences: int
    tokens: int
    past: float

    @property
    def total_tokens(self) -> int:
        return self.sequences * self.tokens


@runtime_checkable
class StepSource(Protocol):
    """A latency source that knows steps of any mix of decoding and prefilling (costs.fitted)."""

    def step_layer(self, format_name: FormatName, step: Sequence[StepPart]) -> tuple[float, bool]:
        """Seconds of one layer; whether the source's grid covers them."""


class LayerSeconds(Protocol):
    def rows(self, tokens: int) -> float:
        """Of a step of so many tokens, attention left out."""

    def decoding(self, sequences: int, keys: int) -> float:
        """Of a step of sequences with one new token each that sees `keys`, itself included."""

    def attention(self, tokens: int, past: int) -> float:
        """What a chunk after `past` cached tokens takes beside its rows."""


def layer_seconds(latencies: Latencies, layer: LayerShape, name: FormatName, rates: Rates) -> LayerSeconds:
    """`layer`: the shard that each device of a group holds."""
    for source in latencies.sources:
        if source.layer(layer, name, rates, Phase(1, 1, 1)) is not None:
            return (
                _BySteps(source, name) if isinstance(source, StepSource) else _ByPhases(latencies, layer, name, rates)
            )
    return _ByPhases(latencies, layer, name, rates)


class _ByPhases:
    """The context of a phase is what its tokens see on average: half of a prompt, and all that was cached before it."""

    def __init__(self, latencies: Latencies, layer: LayerShape, name: FormatName, rates: Rates) -> None:
        self._seconds = cache(lambda phase: latencies.layer(layer, name, rates, phase).seconds)

    def rows(self, tokens: int) -> float:
        return self._seconds(Phase(1, tokens, 0))

    def decoding(self, sequences: int, keys: int) -> float:
        return self._seconds(Phase(sequences, 1, keys))

    def attention(self, tokens: int, past: int) -> float:
        return max(0.0, self._seconds(Phase(1, tokens, past + tokens / 2)) - self.rows(tokens))


class _BySteps:
    """Tokens that see nothing: decoding ones with no keys, beside a chunk of two, the least that makes a step a mixed one."""

    def __init__(self, source: StepSource, name: FormatName) -> None:
        self._seconds = cache(lambda *parts: float(source.step_layer(name, parts)[0]))

    def rows(self, tokens: int) -> float:
        least = StepPart(1, min(2, tokens), 0)
        rest = StepPart(max(0, tokens - 2), 1, -1)
        return self._seconds(least, rest) if rest.sequences else self._seconds(least)

    def decoding(self, sequences: int, keys: int) -> float:
        return self._seconds(StepPart(sequences, 1, keys - 1))

    def attention(self, tokens: int, past: int) -> float:
        return max(0.0, self._seconds(StepPart(1, tokens, past)) - self.rows(tokens))
