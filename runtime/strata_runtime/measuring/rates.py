"""From what was timed on a device to its rates: the planner's roofline, turned round.

Called by `measure`; `timing` takes the seconds. A linear of `format` at one token took bytes / (bandwidth * decode efficiency), at
PREFILL_TOKENS operations / (flops * prefill efficiency). Pure: knows no clock, no device and no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes

PREFILL_TOKENS = 256
SOME_TOKENS = 64  # more than kernels take that multiply packed weights


@dataclass(frozen=True)
class LinearSeconds:
    """One linear: at one token with weights beyond the cache, at PREFILL_TOKENS tokens and at SOME_TOKENS."""

    decode: float
    prefill: float
    some: float

    @property
    def once(self) -> float:
        """What takes as long whatever the number of tokens; of many tokens at most half, whatever noise says."""
        share = SOME_TOKENS / PREFILL_TOKENS
        return min(self.prefill / 2, max(0.0, (self.some - share * self.prefill) / (1 - share)))

    def better(self, other: "LinearSeconds") -> "LinearSeconds":
        """Figure by figure."""
        mine, others = (self.decode, self.prefill, self.some), (other.decode, other.prefill, other.some)
        return LinearSeconds(*map(min, mine, others))


@dataclass(frozen=True)
class Overheads:
    """Seconds: of a layer, reading its `layer_weights` included, and of a step, of each decoding sequence in a layer and in a step, of a
    sampled row. `attention_bytes_per_second`: at which decoding attention reads keys and values; `attention_flops_per_second`: at which that
    of prompts multiplies. `row`: of a prompt's token in a layer, its attention left out; `row_values`: inputs and outputs of its linears; `chunk`:
    what a prompt adds to a layer of decoding sequences beside its rows and its attention. `variation`: of steps alike, their Gini coefficient.
    """

    layer: float
    layer_weights: int
    step: float
    sequence_layer: float
    sequence_step: float
    sampled_row: float
    attention_bytes_per_second: float
    attention_flops_per_second: float
    row: float
    row_values: int
    chunk: float
    variation: float


@dataclass(frozen=True)
class Timings:
    """What was timed. `features`: outputs and inputs of the linears."""

    features: int
    bandwidth_bytes_per_second: float
    flops_per_second: float
    float32_flops_per_second: float
    linears: dict[FormatName, LinearSeconds]
    overheads: Overheads


@dataclass(frozen=True)
class Subject:
    """The device that was timed, and the arithmetic on it."""

    type: str
    memory_bytes: int
    threads: int
    compute_type: ComputeType
    compute_capability: str = ""
    packed_rows: Mapping[FormatName, int] = field(default_factory=dict)


def best_of(first: Timings, second: Timings) -> Timings:
    """The better of two measurements, figure by figure: other programs of the machine only ever add time."""
    return Timings(
        features=first.features,
        bandwidth_bytes_per_second=max(first.bandwidth_bytes_per_second, second.bandwidth_bytes_per_second),
        flops_per_second=max(first.flops_per_second, second.flops_per_second),
        float32_flops_per_second=max(first.float32_flops_per_second, second.float32_flops_per_second),
        linears={name: one.better(second.linears[name]) for name, one in first.linears.items()},
        overheads=first.overheads,  # differences, which a smaller one of two would not make truer
    )


def profile_of(subject: Subject, timings: Timings) -> DeviceProfile:
    """Times to rates. Memory is at least as fast as the fastest linear read it, so no decode efficiency is above 1."""
    size, item = timings.features, COMPUTE_TYPE_BYTES[subject.compute_type]
    operations = 2 * PREFILL_TOKENS * size * size
    flops = timings.float32_flops_per_second if subject.compute_type == "float32" else timings.flops_per_second
    read = {
        name: (stored_bytes(name, size, size, subject.compute_type) + 2 * size * item) / seconds.decode
        for name, seconds in timings.linears.items()
    }
    bandwidth = max(timings.bandwidth_bytes_per_second, *read.values())
    beside, reading = timings.overheads, timings.overheads.layer_weights * item / read["dense"]
    unpacking = {
        name: timings.linears[name].once
        for name, most in subject.packed_rows.items()
        if most < SOME_TOKENS and timings.linears[name].once
    }
    multiplying = {name: seconds.prefill - unpacking.get(name, 0.0) for name, seconds in timings.linears.items()}
    passing = beside.row - 2 * beside.layer_weights * multiplying["dense"] / operations
    return DeviceProfile(
        type=subject.type,
        memory_bytes=subject.memory_bytes,
        bandwidth_bytes_per_second=bandwidth,
        flops_per_second=timings.flops_per_second,
        float32_flops_per_second=timings.float32_flops_per_second,
        decode_efficiency={name: rate / bandwidth for name, rate in read.items()},
        prefill_efficiency={name: operations / (flops * seconds) for name, seconds in multiplying.items()},
        layer_overhead_seconds=max(0.0, beside.layer - reading),
        step_overhead_seconds=beside.step,
        sequence_layer_seconds=beside.sequence_layer,
        sequence_step_seconds=beside.sequence_step,
        sampled_row_seconds=beside.sampled_row,
        attention_bytes_per_second=min(beside.attention_bytes_per_second, bandwidth),
        attention_flops_per_second=min(beside.attention_flops_per_second, flops),
        chunk_layer_seconds=beside.chunk,
        step_variation=beside.variation,
        activation_bytes_per_second=beside.row_values * item / passing if passing > 0 else 0.0,
        source="measured",
        compute_capability=subject.compute_capability,
        threads=subject.threads,
        packed_rows=dict(subject.packed_rows),
        unpacked_per_second={name: size * size / seconds for name, seconds in unpacking.items()},
    )
