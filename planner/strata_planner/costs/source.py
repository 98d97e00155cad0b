"""What a source of latencies is asked and answers: a micro-batch of a phase, a device's arithmetic, seconds with their origin.

Implemented by `roofline` and by the sources of profiles; asked by `latency`. Decoding is taken at half the generation
(LLM-PQ, arXiv 2403.01136, section 4.3: l_dec at t = n/2).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.question.model import LayerShape, Model
from strata_planner.question.workload import Workload


class Phase(NamedTuple):
    """One micro-batch of a phase, or a part of one: `sequences`, each with `tokens` new ones that see `context` keys on average."""

    sequences: int
    tokens: int
    context: float

    @property
    def total_tokens(self) -> int:
        return self.sequences * self.tokens

    @property
    def decoding(self) -> bool:
        return self.tokens == 1

    @property
    def past(self) -> float:
        """Tokens of a sequence that were cached before."""
        return max(0.0, self.context - self.tokens / 2)


def prefill_phase(workload: Workload, sequences: int) -> Phase:
    return Phase(sequences, workload.prompt_tokens, workload.prompt_tokens / 2)


def decode_phase(workload: Workload, sequences: int) -> Phase:
    return Phase(sequences, 1, workload.seen_tokens)


@dataclass(frozen=True)
class Rates:
    """A device and the arithmetic on it. `name`: the device's catalogue name, or the type that a user's profile names."""

    profile: DeviceProfile
    compute_type: ComputeType
    kv_bits: int
    name: str = ""

    def reading(self, format_name: FormatName) -> float:
        """Bytes a second at which products of few rows read weights of this format: as fast as their kernel and the memory allow."""
        own = self.profile.bandwidth_bytes_per_second * self.profile.decode_efficiency[format_name]
        return min(own, self.memory_share)

    @property
    def memory_share(self) -> float:
        """Bytes a second of its node's memory that are left for one device when all of them read; infinite where nobody knows of any others."""
        whole = self.profile.node_bandwidth_bytes_per_second
        return whole / self.profile.node_devices if whole else math.inf

    @property
    def flops_per_second(self) -> float:
        profile = self.profile
        return profile.float32_flops_per_second if self.compute_type == "float32" else profile.flops_per_second


class Timed(NamedTuple):
    """Seconds, and the name of the source that they are from."""

    seconds: float
    source: str


class LatencySource(Protocol):
    """Where seconds come from. Every method returns None for what the source does not know.

    Shapes may be a tensor-parallel shard of a layer; collectives are not part of it.
    """

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        """One decoder layer for one micro-batch."""

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed | None:
        """Final norm and logits of one row per sequence."""

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed | None:
        """What a stage takes for one micro-batch beside its layers and the head: planning the batch, its frames."""
