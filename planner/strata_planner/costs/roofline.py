"""Seconds by a roofline over a device's profile: the source that answers where nothing was measured.

A linear takes max(operations / rate, bytes / bandwidth), on a processor of as many rows as steps are padded to; few rows, which are bound by both, longer
by what was measured. Each expert takes the same, without what was measured of few rows, that a step's tokens are sent to (`routing`). Many rows unpack weights of few bits first, and pass all that is no product (norms,
activations, copies). Attention reads its keys and values and multiplies them; what keeps state instead passes over it as often as the
runtime does, or multiplies a chunk of tokens with itself and with it (Gated DeltaNet, arXiv 2412.06464, section 3.3). Each layer adds the time to launch it and the attention
of each sequence, each step what its batch takes to plan. What is asked about without keys has no attention.
"""

import math
from bisect import bisect_right

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FormatName
from strata_planner.contract.rows import TIMED_ROWS, padded_rows
from strata_planner.costs.memory import kv_bytes_per_token
from strata_planner.costs.routing import spread
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.costs.working import PACKED_ROWS, STATE_CHUNK
from strata_planner.question.catalogue import CPU
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

# Passes over the state of a sequence that decodes: gathered, decayed, read, added to, read, put back; a processor's cache holds it meanwhile.
STATE_PASSES, STATE_PASSES_ON_CPU = 10, 4
_MANY_ROWS = 64  # from which on products reach the rate of many


class Roofline:
    """Knows every device that has a profile and every format that the profile names."""

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed:
        """The format must be one that the device runs."""
        linears = sum(
            linear_seconds(linear, linear.format_in(format_name), rates, phase.total_tokens) for linear in layer.linears
        )
        beside = rates.profile.layer_overhead_seconds + _passing_seconds(layer, rates, phase)
        mixing = _state_seconds if layer.state else _attention_seconds
        return _timed(linears + mixing(layer, rates, phase) + beside, rates)

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed:
        head = Linear("lm_head", model.vocab_size, model.embedding_size)
        sampling = sequences * rates.profile.sampled_row_seconds
        return _timed(linear_seconds(head, model.head_format, rates, sequences) + sampling, rates)

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed:  # noqa: ARG002  other sources know the model's
        profile = rates.profile
        return _timed(profile.step_overhead_seconds + phase.sequences * profile.sequence_step_seconds, rates)


def _timed(seconds: float, rates: Rates) -> Timed:
    return Timed(seconds, f"roofline, {rates.profile.source}")


def linear_seconds(linear: Linear, format_name: FormatName, rates: Rates, tokens: int) -> float:
    """One linear operator over `tokens` rows, of all its copies. The format must be one that the device runs."""
    profile = rates.profile
    flops = rates.flops_per_second * profile.prefill_efficiency[format_name]
    bandwidth = rates.reading(format_name)
    weights = linear.out_features * linear.in_features
    reading = linear.weight_bytes(format_name, rates.compute_type) / bandwidth
    row_moved = (linear.in_features + linear.out_features) * COMPUTE_TYPE_BYTES[rates.compute_type] / bandwidth
    packed = profile.packed_rows.get(format_name, PACKED_ROWS[format_name])
    unpacked = weights / profile.unpacked_per_second.get(format_name, math.inf)
    unpacking = unpacked if tokens > packed else 0.0
    if linear.copies > linear.active:
        routed = spread(linear.copies, linear.active, tokens)
        return routed.seconds(2 * tokens * weights / flops, reading, tokens * row_moved) + routed.read[-1] * unpacking

    def of(tokens: int, rows: int) -> float:
        multiplying = 2 * rows * weights / flops + (unpacked if tokens > packed else 0.0)
        return max(multiplying, reading + tokens * row_moved) / _few_rows_efficiency(profile, format_name, rows)

    rows = padded_rows(tokens) if rates.name == CPU and profile.pads(rates.compute_type) else tokens
    # More rows take no less, however quick the next number is that was timed.
    fewer = [each for each in (1, *TIMED_ROWS) if each < rows] if format_name in profile.few_rows_efficiency else []
    return linear.copies * max([of(tokens, rows), *(of(each, each) for each in fewer)])


def _few_rows_efficiency(profile: DeviceProfile, format_name: FormatName, rows: int) -> float:
    """Between the numbers of rows that were timed by their logarithm; one row, and many, are what the rates are from."""
    found = profile.few_rows_efficiency.get(format_name)
    if not found or not 1 < rows < _MANY_ROWS:
        return 1.0
    known = (1, *TIMED_ROWS, _MANY_ROWS)
    at = bisect_right(known, rows) - 1
    low, high = (1.0, *found, 1.0)[at : at + 2]
    return low + (high - low) * math.log(rows / known[at]) / math.log(known[at + 1] / known[at])


def _passing_seconds(layer: LayerShape, rates: Rates, phase: Phase) -> float:
    """Of prompts, beside products and attention; decoding sequences have it in their own seconds."""
    if phase.decoding:
        return 0.0
    profile = rates.profile
    size = phase.total_tokens * row_values(layer) * COMPUTE_TYPE_BYTES[rates.compute_type]
    rows = size / profile.activation_bytes_per_second if profile.activation_bytes_per_second else 0.0
    return profile.chunk_layer_seconds + rows


def row_values(layer: LayerShape) -> int:
    """Inputs and outputs of all linears that a token passes."""
    return sum((each.in_features + each.out_features) * min(each.copies, each.active) for each in layer.linears)


def _state_seconds(layer: LayerShape, rates: Rates, phase: Phase) -> float:
    """In float32, whatever the compute type is: of a sequence that decodes one row, of a prompt chunk after chunk."""
    state, profile = layer.state, rates.profile
    if state is None or not phase.context:
        return 0.0
    launched = phase.sequences * profile.sequence_layer_seconds
    if phase.decoding:
        passes = STATE_PASSES_ON_CPU if rates.name == CPU else STATE_PASSES
        return launched + phase.sequences * passes * state.bytes(rates.compute_type) / rates.reading("dense")
    within = STATE_CHUNK * (5 * state.key_dim + 3 * state.value_dim)
    operations = phase.total_tokens * state.heads * (within + 6 * state.key_dim * state.value_dim)
    return launched + operations / (profile.float32_flops_per_second * profile.prefill_efficiency["dense"])


def _attention_seconds(layer: LayerShape, rates: Rates, phase: Phase) -> float:
    profile = rates.profile
    keys_read = phase.sequences * phase.context * kv_bytes_per_token(layer, rates.kv_bits, rates.compute_type)
    operations = 4 * phase.total_tokens * phase.context * layer.heads * layer.head_dim
    rate = rates.reading("dense")
    if phase.decoding and profile.attention_bytes_per_second:
        rate = min(profile.attention_bytes_per_second, rates.memory_share)
    flops = rates.flops_per_second * profile.prefill_efficiency["dense"]
    if not phase.decoding and profile.attention_flops_per_second:
        flops = profile.attention_flops_per_second
    launched = phase.sequences * profile.sequence_layer_seconds if phase.context else 0.0
    return launched + max(operations / flops, keys_read / rate)
