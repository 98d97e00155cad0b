"""Seconds of one step on one stage, from the costs' sources: what a plan's stages are simulated with. Made by `replica`.

Sources know micro-batches of one phase and one length; a step of the engine mixes chunks of prompts with decoding sequences. It
computes its linears once for all tokens and attention apart for each part. So, with L a source's seconds of a layer,

    only decoding   L(n sequences, 1 token each, their keys)
    any other       L(all tokens, no keys) + the parts' attention, each L(part, its keys) - L(part, no keys)

which is exact where linears and attention add up. All is tabulated as it is first asked for, exactly in tokens, linear between
powers of two of the keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.costs.communication import (
    Exchange,
    hand_over_seconds,
    hidden_states_bytes,
    hidden_states_seconds,
    layer_collectives,
    sampled_tokens_seconds,
)
from strata_planner.costs.latency import Latencies
from strata_planner.costs.shards import Portion, portion_of, portion_on
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.cluster import Accelerator, Cluster, DeviceGroup, LinkRate
from strata_planner.question.model import LayerShape, Model
from strata_planner.simulate.layer_seconds import LayerSeconds
from strata_planner.simulate.stage import Batch, Hop, StageSeconds

Layers = Mapping[tuple[LayerShape, FormatName], int]  # how many of each a stage has


class StagePricer:
    """Prices stages of one model on one cluster; stages alike in device and degree share what was asked of the sources."""

    def __init__(self, model: Model, cluster: Cluster, compute_type: ComputeType, latencies: Latencies) -> None:
        self.model = model
        self.cluster = cluster
        self.compute_type = compute_type
        self._latencies = latencies
        self._shared: dict[tuple[object, ...], LayerSeconds] = {}

    def stage(self, layers: Layers, group: DeviceGroup, *, kv_bits: int, head: bool) -> StageSeconds:
        """Of a stage that holds `layers` on `group`. Unlike devices wait for the slowest."""
        ranks = [self._of_rank(layers, each, kv_bits, head=head) for each in group.ranks]
        return ranks[0] if len(ranks) == 1 else lambda batch: max(seconds(batch) for seconds in ranks)

    def _of_rank(self, layers: Layers, group: DeviceGroup, kv_bits: int, *, head: bool) -> StageSeconds:
        rates, portion = Rates(group.profile, self.compute_type, kv_bits, group.own.name), portion_on(group)
        counted = [(self._layer(layer, name, rates, portion), count) for (layer, name), count in layers.items()]
        link = self.cluster.slowest_link(group) if group.degree > 1 else None
        return StageTable(_Stage(self.model, self._latencies, rates, counted, portion, link), head=head)

    def hop(self, source: Accelerator, target: Accelerator, *, sampled: bool, states: int = 0) -> Hop:
        """Between the leaders of two stages: of hidden states, or of sampled tokens on the way back to the first. `states`: beside either those of so
        many layers, which a head reads.
        """
        link = self.cluster.link(source, target)
        latency, row = (self._hidden_states(link, count) for count in (0, 1))
        per_row = row - latency
        if sampled:
            return Hop(latency, sampled_tokens_seconds(link, 1) - latency, states * per_row)
        return Hop(latency, (1 + states) * per_row)

    def _hidden_states(self, link: LinkRate, tokens: int) -> float:
        return hidden_states_seconds(self.model, link, tokens, self.compute_type)

    def _layer(self, layer: LayerShape, name: FormatName, rates: Rates, portion: Portion) -> LayerSeconds:
        profile = msgspec.json.encode(rates.profile, order="sorted")
        key = (layer, name, portion, rates.kv_bits, rates.name, profile)
        if key not in self._shared:
            self._shared[key] = LayerSeconds(self._latencies, portion_of(layer, portion), name, rates)
        return self._shared[key]


@dataclass(frozen=True)
class _Stage:
    """The parts of a stage's steps, summed over its layers. `link`: the slowest inside the group, None for one device."""

    model: Model
    latencies: Latencies
    rates: Rates
    layers: Sequence[tuple[LayerSeconds, int]]
    portion: Portion
    link: LinkRate | None

    def rows(self, tokens: int) -> float:
        return sum(count * layer.rows(tokens) for layer, count in self.layers) + self._collectives(tokens)

    def decoding(self, sequences: int, keys: int) -> float:
        layers = sum(count * layer.decoding(sequences, keys) for layer, count in self.layers)
        return layers + self._collectives(sequences)

    def attention(self, tokens: int, past: int) -> float:
        return sum(count * layer.attention(tokens, past) for layer, count in self.layers)

    def overhead(self, segments: int, tokens: int) -> float:
        """Of a step beside its layers, the head left out."""
        phase = Phase(segments, max(1, round(tokens / segments)), 0)
        size = hidden_states_bytes(self.model, tokens, self.rates.compute_type)
        handed = hand_over_seconds(self.rates.name, self.portion.degree, self.link, size) if self.link else 0.0
        return float(self.latencies.step(self.model, self.rates, phase).seconds) + handed

    def logits(self, rows: int) -> float:
        return float(self.latencies.head(self.model, self.rates, rows).seconds) * self.portion.fraction(
            self.model.vocab_size
        )

    def _collectives(self, tokens: int) -> float:
        if self.link is None:
            return 0.0
        size = hidden_states_bytes(self.model, tokens, self.rates.compute_type)
        exchange = Exchange(self.rates.name, self.portion.degree, self.link, size)
        one = layer_collectives(self.latencies.sources, exchange).seconds
        return one * sum(count for _, count in self.layers)


class StageTable:
    """A stage's seconds, from tables that fill as they are asked."""

    def __init__(self, stage: _Stage, *, head: bool) -> None:
        self._stage = stage
        self._rows = _Table(stage.rows)
        self._overhead: dict[tuple[int, int], float] = {}
        self._logits = _Table(stage.logits) if head else None
        self._fresh = _Table(lambda tokens: stage.attention(tokens, 0))
        self._decoding: dict[tuple[int, int], tuple[float, float]] = {}
        self._continued: dict[tuple[int, int], tuple[float, float]] = {}

    def __call__(self, batch: Batch) -> float:
        tokens, sampled, decoding, decode_keys, chunks = batch
        if not chunks:
            seconds = self._decode(decoding, decode_keys)
        else:
            seconds = self._rows[tokens]
            if decoding:
                seconds += max(0.0, self._decode(decoding, decode_keys) - self._decode(decoding, 0))
            for length, past in chunks:
                seconds += self._continue(length, past) if past else self._fresh[length]
        size = (decoding + len(chunks), tokens)
        overhead = self._overhead.get(size)
        if overhead is None:
            overhead = self._overhead[size] = self._stage.overhead(*size)
        return seconds + overhead + (self._logits[sampled] if self._logits is not None and sampled else 0.0)

    def _decode(self, sequences: int, keys: int) -> float:
        """For sequences that see so many keys together."""
        power = (keys // sequences).bit_length()
        line = self._decoding.get((sequences, power))
        if line is None:
            line = _line(lambda end: self._stage.decoding(sequences, end), power)
            self._decoding[sequences, power] = line
        return line[0] + line[1] * keys / sequences

    def _continue(self, tokens: int, past: int) -> float:
        power = past.bit_length()
        line = self._continued.get((tokens, power))
        if line is None:
            line = self._continued[tokens, power] = _line(lambda end: self._stage.attention(tokens, end), power)
        return line[0] + line[1] * past


class _Table(dict[int, float]):
    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds

    def __missing__(self, key: int) -> float:
        self[key] = value = self._seconds(key)
        return value


def _line(seconds: Callable[[int], float], power: int) -> tuple[float, float]:
    """Value at 0 and slope of the line through the powers of two around numbers of `power` binary digits; 0 and 1 around 0."""
    low, high = (1 << power - 1, 1 << power) if power else (0, 1)
    at_low = seconds(low)
    slope = (seconds(high) - at_low) / (high - low)
    return at_low - slope * low, slope
