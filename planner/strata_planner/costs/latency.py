"""Seconds of a layer and of the head in the two phases, by a roofline over a device's profile.

Called by the search for every kind of device. A linear takes max(operations / rate, bytes / bandwidth); attention reads its
keys and values and multiplies them; each layer adds the time to launch it. Decoding is taken at half the generation
(LLM-PQ, arXiv 2403.01136, section 4.3: l_dec at t = n/2). Fitted models will replace the roofline where profiles exist.
"""

from dataclasses import dataclass

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.costs.memory import kv_bytes_per_token
from strata_planner.model import LayerShape, Linear, Model
from strata_planner.workload import Workload


@dataclass(frozen=True)
class Phase:
    """One micro-batch of a phase: `sequences`, each with `tokens` new ones that see `context` keys on average."""

    sequences: int
    tokens: int
    context: float

    @property
    def total_tokens(self) -> int:
        return self.sequences * self.tokens


def prefill_phase(workload: Workload, sequences: int) -> Phase:
    return Phase(sequences, workload.prompt_tokens, workload.prompt_tokens / 2)


def decode_phase(workload: Workload, sequences: int) -> Phase:
    return Phase(sequences, 1, workload.prompt_tokens + workload.output_tokens / 2)


@dataclass(frozen=True)
class Rates:
    """A device and the arithmetic on it."""

    profile: DeviceProfile
    compute_type: ComputeType
    kv_bits: int

    @property
    def flops_per_second(self) -> float:
        profile = self.profile
        return profile.float32_flops_per_second if self.compute_type == "float32" else profile.flops_per_second


def layer_seconds(layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> float:
    """One decoder layer for one micro-batch. The format must be one the device runs."""
    linears = sum(
        _linear_seconds(linear, format_name if linear.quantizable else "dense", rates, phase.total_tokens)
        for linear in layer.linears
    )
    return linears + _attention_seconds(layer, rates, phase) + rates.profile.layer_overhead_seconds


def head_seconds(model: Model, rates: Rates, sequences: int) -> float:
    """Logits of one row per sequence."""
    head = Linear("lm_head", model.vocab_size, model.embedding_size)
    return _linear_seconds(head, "dense", rates, sequences)


def _linear_seconds(linear: Linear, format_name: FormatName, rates: Rates, tokens: int) -> float:
    item = COMPUTE_TYPE_BYTES[rates.compute_type]
    one = stored_bytes(format_name, linear.out_features, linear.in_features, rates.compute_type)
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
