"""From what was timed on a device to its rates: the planner's roofline, turned round.

Called by `measure`; `timing` takes the seconds. A linear of `format` at one token took bytes / (bandwidth * decode efficiency), at
PREFILL_TOKENS operations / (flops * prefill efficiency), at a few tokens the longer of the two / few rows' efficiency. Pure: knows no clock, no device
and no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.contract.rows import TIMED_ROWS

PREFILL_TOKENS = 256
SOME_TOKENS = 64  # more than kernels take that multiply packed weights


@dataclass(frozen=True)
class LinearSeconds:
    """One linear: at one token with weights beyond the cache, at PREFILL_TOKENS tokens and at SOME_TOKENS; at TIMED_ROWS, with weights beyond the cache,
    or at none of these.
    """

    decode: float
    prefill: float
    some: float
    few: tuple[float, ...] = ()

    @property
    def once(self) -> float:
        """What takes as long whatever the number of tokens; of many tokens at most half, whatever noise says."""
        share = SOME_TOKENS / PREFILL_TOKENS
        return min(self.prefill / 2, max(0.0, (self.some - share * self.prefill) / (1 - share)))

    def of_rows(self, rows: int) -> float:
        """At so many, of TIMED_ROWS; no less than at one. Where they were not timed as long as either bound."""
        if self.few:
            return max(self.decode, self.few[TIMED_ROWS.index(rows)])
        return max(self.decode, self.prefill * rows / PREFILL_TOKENS)

    def mean(self, other: "LinearSeconds") -> "LinearSeconds":
        """Figure by figure; few rows where both were timed."""
        few = tuple((mine + theirs) / 2 for mine, theirs in zip(self.few, other.few, strict=False))
        decode, prefill, some = (
            (getattr(self, name) + getattr(other, name)) / 2 for name in ("decode", "prefill", "some")
        )
        return LinearSeconds(decode, prefill, some, few)


@dataclass(frozen=True)
class Overheads:
    """Seconds: of a layer, reading its `layer_weights` included, and of a step, of each decoding sequence in a layer, products of its row included (in the
    mean of the second to the last of `sequences`), and in a step, of a sampled row. `attention_bytes_per_second`: at which decoding attention reads
    keys and values; `attention_flops_per_second`: at which that of prompts multiplies. `row`: of a prompt's token in a layer of `row_weights`, its
    attention left out; `row_values`: inputs and outputs of its linears; `chunk`: what a prompt adds to a layer of decoding sequences beside its rows
    and its attention. `variation`: of steps alike, their Gini coefficient.
    """

    layer: float
    layer_weights: int
    sequences: int
    step: float
    sequence_layer: float
    sequence_step: float
    sampled_row: float
    attention_bytes_per_second: float
    attention_flops_per_second: float
    row: float
    row_weights: int
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
    pads_rows: bool = True


def mean_of(first: Timings, second: Timings) -> Timings:
    """Of two measurements with the same overheads, figure by figure."""
    rates = ("bandwidth_bytes_per_second", "flops_per_second", "float32_flops_per_second")
    return replace(
        first,
        **{name: (getattr(first, name) + getattr(second, name)) / 2 for name in rates},
        linears={name: one.mean(second.linears[name]) for name, one in first.linears.items()},
    )


def profile_of(subject: Subject, timings: Timings) -> DeviceProfile:
    """Times to rates. Memory is at least as fast as the fastest linear read it, so no decode efficiency is above 1."""
    size, item, beside = timings.features, COMPUTE_TYPE_BYTES[subject.compute_type], timings.overheads
    operations, values = 2 * PREFILL_TOKENS * size * size, 2 * size * item
    flops = timings.float32_flops_per_second if subject.compute_type == "float32" else timings.flops_per_second
    stored = {name: stored_bytes(name, size, size, subject.compute_type) for name in timings.linears}
    read = {name: (stored[name] + values) / seconds.decode for name, seconds in timings.linears.items()}
    bandwidth = max(timings.bandwidth_bytes_per_second, *read.values())
    unpacking = _unpacking(subject, timings)
    multiplying = {name: seconds.prefill - unpacking.get(name, 0.0) for name, seconds in timings.linears.items()}
    reading, row = beside.layer_weights * item / read["dense"], _products_of_a_row(timings)
    few = {
        name: _few_rows_efficiency(seconds, stored[name], values, subject.packed_rows.get(name))
        for name, seconds in timings.linears.items()
        if seconds.few
    }
    passing = beside.row - 2 * beside.row_weights * multiplying["dense"] / operations
    return DeviceProfile(
        type=subject.type,
        memory_bytes=subject.memory_bytes,
        bandwidth_bytes_per_second=bandwidth,
        flops_per_second=timings.flops_per_second,
        float32_flops_per_second=timings.float32_flops_per_second,
        decode_efficiency={name: rate / bandwidth for name, rate in read.items()},
        prefill_efficiency={name: operations / (flops * seconds) for name, seconds in multiplying.items()},
        layer_overhead_seconds=max(0.0, beside.layer - reading + min(row, beside.sequence_layer)),
        step_overhead_seconds=beside.step,
        sequence_layer_seconds=max(0.0, beside.sequence_layer - row),
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
        pads_rows=subject.pads_rows,
        unpacked_per_second={name: size * size / seconds for name, seconds in unpacking.items()},
        few_rows_efficiency=few,
    )


def _unpacking(subject: Subject, timings: Timings) -> dict[FormatName, float]:
    """Seconds of bringing weights back, of formats whose kernels multiply no more than few tokens packed."""
    return {
        name: timings.linears[name].once
        for name, most in subject.packed_rows.items()
        if most < SOME_TOKENS and timings.linears[name].once
    }


def _products_of_a_row(timings: Timings) -> float:
    """Seconds in a layer, of a decoding row, which the roofline counts with those of the others."""
    dense, beside = timings.linears["dense"], timings.overheads
    part = beside.layer_weights / timings.features**2 / (beside.sequences - 1)
    return (dense.of_rows(beside.sequences) - dense.decode) * part


def _few_rows_efficiency(seconds: LinearSeconds, weights: int, row: int, packed: int | None) -> tuple[float, ...]:
    """What the roofline tells over what was timed, at TIMED_ROWS; more rows never seem to take less. `weights`, `row`: bytes of the weights, and of one
    row's input and output; `packed`: rows that are multiplied as stored.
    """
    unpacks = packed is not None and packed < SOME_TOKENS
    once = seconds.once if unpacks else 0.0
    found, longest = [], seconds.decode
    for rows, timed in zip(TIMED_ROWS, seconds.few, strict=True):
        reading = seconds.decode * (weights + rows * row) / (weights + row)
        multiplying = (seconds.prefill - once) * rows / PREFILL_TOKENS + once * (unpacks and rows > (packed or 0))
        longest = max(longest, timed)
        found.append(max(reading, multiplying) / longest)
    return tuple(found)
