"""Seconds of one step on one stage, from the costs' sources: what a plan's stages are simulated with. Made by `replica`.

Sources know micro-batches of one phase and one length; a step of the engine mixes chunks of prompts with decoding sequences. It
computes its linears once for all tokens and attention apart for each part. So, with L a source's seconds of a layer,

    only decoding   L(n sequences, 1 token each, their keys)
    any other       L(1 sequence, all tokens, no keys) + the parts' attention, each L(part, its keys) - L(part, no keys)

which is exact where linears and attention add up. All is tabulated as it is first asked for: linears at every number of
tokens, attention at powers of two of tokens and keys, linear between them.
"""

from collections.abc import Callable, Mapping

import msgspec

from strata_planner.cluster import Accelerator, Cluster, DeviceGroup, LinkRate
from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.costs.communication import (
    Exchange,
    hidden_states_bytes,
    hidden_states_seconds,
    layer_collectives,
    sampled_tokens_seconds,
)
from strata_planner.costs.latency import Latencies
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, Rates
from strata_planner.model import LayerShape, Model
from strata_planner.simulate.stage import Batch, Hop, StageSeconds

Layers = Mapping[tuple[LayerShape, FormatName], int]  # how many of each a stage has
_PhaseSeconds = Callable[[Phase], float]


class StagePricer:
    """Prices stages of one model on one cluster; stages alike in device and degree share what was asked of the sources."""

    def __init__(self, model: Model, cluster: Cluster, compute_type: ComputeType, latencies: Latencies) -> None:
        self.model = model
        self.cluster = cluster
        self.compute_type = compute_type
        self._latencies = latencies
        self._shared: dict[tuple[object, ...], _PhaseSeconds] = {}

    def stage(self, layers: Layers, group: DeviceGroup, *, kv_bits: int, head: bool) -> StageSeconds:
        """Of a stage that holds `layers` on `group`."""
        rates = Rates(group.profile, self.compute_type, kv_bits, group.leader.name)
        counted = [(count, self._layer(layer, name, rates, group.degree)) for (layer, name), count in layers.items()]
        total = sum(layers.values())
        model, latencies, link = self.model, self._latencies, self._slowest_link(group)

        def body(phase: Phase) -> float:
            seconds = latencies.step(model, rates, phase).seconds + sum(
                count * layer(phase) for count, layer in counted
            )
            if link is None:
                return seconds
            size = hidden_states_bytes(model, phase.total_tokens, self.compute_type)
            exchange = Exchange(group.leader.name, group.degree, link, size)
            return seconds + total * layer_collectives(latencies.sources, exchange).seconds

        def logits(rows: int) -> float:
            return latencies.head(model, rates, rows).seconds / group.degree

        return StageTable(body, logits if head else None)

    def hop(self, source: Accelerator, target: Accelerator, *, sampled: bool) -> Hop:
        """Between the leaders of two stages: of hidden states, or of sampled tokens on the way back to the first."""
        link = self.cluster.link(source, target)
        latency, one = (
            sampled_tokens_seconds(link, count) if sampled else self._hidden_states(link, count) for count in (0, 1)
        )
        return Hop(latency, one - latency)

    def _hidden_states(self, link: LinkRate, tokens: int) -> float:
        return hidden_states_seconds(self.model, link, tokens, self.compute_type)

    def _layer(self, layer: LayerShape, name: FormatName, rates: Rates, degree: int) -> _PhaseSeconds:
        profile = msgspec.json.encode(rates.profile, order="sorted")
        key = (layer, name, degree, rates.kv_bits, rates.name, profile)
        if key not in self._shared:
            shard, known = sharded(layer, degree), dict[Phase, float]()

            def seconds(phase: Phase) -> float:
                if phase not in known:
                    known[phase] = self._latencies.layer(shard, name, rates, phase).seconds
                return known[phase]

            self._shared[key] = seconds
        return self._shared[key]

    def _slowest_link(self, group: DeviceGroup) -> LinkRate | None:
        """Between two devices of the group; None for a single device."""
        pairs = ((a, b) for a in group.devices for b in group.devices if a != b)
        return min((self.cluster.link(*pair) for pair in pairs), key=lambda link: link.gbps, default=None)


class StageTable:
    """`body`: seconds of everything but the head for a micro-batch of one phase; `logits`: of the head for so many rows."""

    def __init__(self, body: _PhaseSeconds, logits: Callable[[int], float] | None) -> None:
        self._body = body
        self._logits = logits
        self._of_tokens: dict[int, float] = {}
        self._of_rows: dict[int, float] = {0: 0.0}
        self._decoding: dict[tuple[int, int], tuple[float, float]] = {}
        self._chunks: dict[tuple[int, int], tuple[float, float, float, float]] = {}

    def __call__(self, batch: Batch) -> float:
        tokens, sampled, decoding, decode_keys, chunks = batch
        if not chunks:
            return self._decode(decoding, decode_keys) + self._head(sampled)
        seconds = self._of_tokens.get(tokens)
        if seconds is None:
            seconds = self._of_tokens[tokens] = self._body(Phase(1, tokens, 0))
        if decoding:
            seconds += max(0.0, self._decode(decoding, decode_keys) - self._decode(decoding, 0))
        for length, past in chunks:
            seconds += self._attention(length, past + length / 2)
        return seconds + self._head(sampled)

    def _head(self, rows: int) -> float:
        if self._logits is None:
            return 0.0
        if rows not in self._of_rows:
            self._of_rows[rows] = self._logits(rows)
        return self._of_rows[rows]

    def _decode(self, sequences: int, keys: int) -> float:
        """All but the head, for sequences that see so many keys together: linear between powers of two of the mean."""
        power = (keys // sequences).bit_length()
        line = self._decoding.get((sequences, power))
        if line is None:
            low, high = _ends(power)
            at_low, at_high = (self._body(Phase(sequences, 1, end)) for end in (low, high))
            slope = (at_high - at_low) / ((high - low) * sequences)
            line = self._decoding[sequences, power] = (at_low - slope * low * sequences, slope)
        return line[0] + line[1] * keys

    def _attention(self, tokens: int, context: float) -> float:
        """Of one chunk whose tokens see `context` keys on average: bilinear between powers of two of both."""
        key = (tokens.bit_length(), int(context).bit_length())
        patch = self._chunks.get(key)
        if patch is None:
            patch = self._chunks[key] = self._patch(_ends(key[0]), _ends(key[1]))
        constant, by_tokens, by_context, by_both = patch
        return constant + by_tokens * tokens + (by_context + by_both * tokens) * context

    def _patch(self, tokens: tuple[int, int], context: tuple[int, int]) -> tuple[float, float, float, float]:
        """The bilinear function through the attention at four corners, as coefficients of 1, tokens, context, product."""
        (t0, t1), (c0, c1) = tokens, context
        f00, f01, f10, f11 = (self._attention_at(t, c) for t in tokens for c in context)
        area = (t1 - t0) * (c1 - c0)
        by_both = (f11 - f10 - f01 + f00) / area
        by_tokens = (f10 - f00) / (t1 - t0) - by_both * c0
        by_context = (f01 - f00) / (c1 - c0) - by_both * t0
        return f00 - by_tokens * t0 - by_context * c0 - by_both * t0 * c0, by_tokens, by_context, by_both

    def _attention_at(self, tokens: int, context: int) -> float:
        return max(0.0, self._body(Phase(1, tokens, context)) - self._body(Phase(1, tokens, 0)))


def _ends(power: int) -> tuple[int, int]:
    """The powers of two around the numbers that have `power` binary digits; 0 and 1 around 0."""
    return (1 << power - 1, 1 << power) if power else (0, 1)
