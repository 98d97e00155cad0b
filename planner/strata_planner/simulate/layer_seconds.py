"""Seconds of one layer in the parts that steps are made of: rows that see nothing, decoding sequences, chunks' attention.

Made by `pricing`, once per kind of layer and device. The context of a phase is what its tokens see on average (half of a
prompt, and all that was cached before it), so that a source asked with no context answers without attention. Answers are remembered.
"""

from functools import cache

from strata_planner.contract.formats import FormatName
from strata_planner.costs.latency import Latencies
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.model import LayerShape


class LayerSeconds:
    """`layer`: the shard that each device of a group holds."""

    def __init__(self, latencies: Latencies, layer: LayerShape, format_name: FormatName, rates: Rates) -> None:
        self._seconds = cache(lambda phase: float(latencies.layer(layer, format_name, rates, phase).seconds))

    def rows(self, tokens: int) -> float:
        """Of a step of so many tokens, attention left out."""
        return self._seconds(Phase(1, tokens, 0))

    def decoding(self, sequences: int, keys: int) -> float:
        """Of a step of sequences with one new token each that sees `keys`, itself included."""
        return self._seconds(Phase(sequences, 1, keys))

    def attention(self, tokens: int, past: int) -> float:
        """What a chunk after `past` cached tokens takes beside its rows."""
        return max(0.0, self._seconds(Phase(1, tokens, past + tokens / 2)) - self.rows(tokens))
