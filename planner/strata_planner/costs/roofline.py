"""Seconds by a roofline over a device's profile: the source that answers where nothing was measured.

A linear takes max(operations / rate, bytes / bandwidth); attention reads its keys and values and multiplies them; each
layer adds the time to launch it, each step what its batch takes to plan.
"""

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FormatName
from strata_planner.costs.memory import kv_bytes_per_token
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.question.model import LayerShape, Linear, Model


class Roofline:
    """Knows every device that has a profile and every format that the profile names."""

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed:
        """The format must be one that the device runs."""
        linears = sum(
            linear_seconds(linear, linear.format_in(format_name), rates, phase.total_tokens) for linear in layer.linears
        )
        overhead = rates.profile.layer_overhead_seconds
        return _timed(linears + _attention_seconds(layer, rates, phase) + overhead, rates)

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed:
        head = Linear("lm_head", model.vocab_size, model.embedding_size)
        return _timed(linear_seconds(head, "dense", rates, sequences), rates)

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed:  # noqa: ARG002  other sources know the model's
        return _timed(rates.profile.step_overhead_seconds, rates)


def _timed(seconds: float, rates: Rates) -> Timed:
    return Timed(seconds, f"roofline, {rates.profile.source}")


def linear_seconds(linear: Linear, format_name: FormatName, rates: Rates, tokens: int) -> float:
    """One linear operator over `tokens` rows. The format must be one that the device runs."""
    item = COMPUTE_TYPE_BYTES[rates.compute_type]
    one = linear.weight_bytes(format_name, rates.compute_type)
    weights = one * _copies_touched(linear, tokens)
    activations = tokens * linear.active * (linear.in_features + linear.out_features) * item
    operations = 2 * tokens * linear.active * linear.out_features * linear.in_features
    profile = rates.profile
    return max(
        operations / (rates.flops_per_second * profile.prefill_efficiency[format_name]),
        (weights + activations) / (profile.bandwidth_bytes_per_second * profile.decode_efficiency[format_name]),
    )


def _copies_touched(linear: Linear, tokens: int) -> float:
    """How many experts a batch reads when each token picks its own at random."""
    if linear.copies == linear.active:
        return linear.copies
    return linear.copies * (1 - (1 - linear.active / linear.copies) ** tokens)


def _attention_seconds(layer: LayerShape, rates: Rates, phase: Phase) -> float:
    profile = rates.profile
    keys_read = phase.sequences * phase.context * kv_bytes_per_token(layer, rates.kv_bits, rates.compute_type)
    operations = 4 * phase.total_tokens * phase.context * layer.heads * layer.head_dim
    return max(
        operations / (rates.flops_per_second * profile.prefill_efficiency["dense"]),
        keys_read / (profile.bandwidth_bytes_per_second * profile.decode_efficiency["dense"]),
    )
