"""The latency profile: what decoder layers of one model took on one device, point by point, and how that was measured.

Written by `python -m strata_runtime.measuring.profiling`, read by the planner's `costs.fitted`. Versioned: a profile of another version is
refused, not guessed at. Knows no regression.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Self

import msgspec

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.quantization import ModuleQuantization
from strata_planner.contract.strategies import StrategyName
from strata_planner.contract.values import ContractError, Value, from_json, to_json

LATENCY_PROFILE_VERSION = 2
PhaseName = Literal["prefill", "decode"]


class LinearShape(Value, frozen=True, order=True):
    out_features: int
    in_features: int


class StoredLinear(Value, frozen=True):
    """A linear of a GPTQ checkpoint, and how it is stored there; None: in 16 bits."""

    out_features: int
    in_features: int
    stored: ModuleQuantization | None


class ProfiledModel(Value, frozen=True):
    """The shapes that were measured. `linears`: of one layer, in increasing order, whatever they are called."""

    architecture: str
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    linears: tuple[LinearShape, ...]


class ProfiledDevice(Value, frozen=True):
    """Where it was measured. `type`: what cluster files call the device; `library`: the digest of the native kernels' sources."""

    type: str
    processor: str
    threads: int
    torch: str
    library: str = ""


class KernelRange(Value, frozen=True):
    """Steps of at most `most_rows` rows (and more than the range before it) multiply with `kernel`."""

    format: FormatName
    kernel: str
    most_rows: int


class LatencyPoint(Value, frozen=True):
    """One micro-batch: `sequences` with `tokens` new tokens each after `past` that are cached.

    `layer_seconds`: one decoder layer stored in `format`; `step_seconds`: what its executor took beside the layers.
    """

    format: FormatName
    kernel: str
    phase: PhaseName
    sequences: int
    tokens: int
    past: int
    layer_seconds: float
    step_seconds: float


class HeadPoint(Value, frozen=True):
    """Final norm, logits and sampling of one row for each of `sequences`."""

    sequences: int
    seconds: float


class HandlingPoint(Value, frozen=True):
    """Processor time of one stage for the messages and the scheduling of a step of `sequences` and `tokens`, both means of many."""

    sequences: float
    tokens: float
    seconds: float


class StrategyPoint(Value, frozen=True):
    """A layer stored in `format` over so many ranks, each with the profile's threads: one prompt of `tokens`, by the clock on the wall, sums included."""

    ranks: int
    format: FormatName
    strategy: StrategyName
    tokens: int
    layer_seconds: float


class SharedLayers(Value, frozen=True):
    """Layers that so many ranks share, each with the profile's threads, by Megatron's cut: seconds by the clock on the wall, sums included."""

    ranks: int
    points: tuple[LatencyPoint, ...]

    @property
    def formats(self) -> frozenset[FormatName]:
        return frozenset(point.format for point in self.points)

    def of(self, names: Collection[FormatName]) -> Self:
        """With the points of these formats alone."""
        return msgspec.structs.replace(self, points=tuple(each for each in self.points if each.format in names))


class LatencyProfile(Value, frozen=True):
    """`layers`: how many layers of each format were gone through in turn. `row_sizes`: row numbers that steps are padded to, then
    multiples of `row_multiple` (1: no padding). `stored`: of each format of a GPTQ checkpoint, how the linears of its layers lie there.
    `company`: processes that decoded meanwhile.
    """

    version: int
    device: ProfiledDevice
    compute_type: ComputeType
    kv_bits: int
    model: ProfiledModel
    layers: dict[FormatName, int]
    row_sizes: tuple[int, ...]
    row_multiple: int
    max_step_tokens: int  # longer prefills are cut into steps of this many tokens
    kernels: tuple[KernelRange, ...]
    points: tuple[LatencyPoint, ...]
    head: tuple[HeadPoint, ...]
    handling: tuple[HandlingPoint, ...] = ()
    stored: dict[FormatName, tuple[StoredLinear, ...]] = msgspec.field(default_factory=dict)
    company: int = 0
    strategies: tuple[StrategyPoint, ...] = ()  # of stages that several devices like this one share
    shared: tuple[SharedLayers, ...] = ()  # of the same stages, by number of ranks
    # Mean relative error per format and phase, of points left out of the fit one by one; written once the profile has been fitted.
    leave_one_out: dict[str, float] = msgspec.field(default_factory=dict)

    def encode(self) -> bytes:
        return to_json(self)

    @classmethod
    def decode(cls, data: bytes | str) -> Self:
        """Raises ContractError for malformed JSON, another version, or points that cannot be."""
        version = _version_of(data)
        if version != LATENCY_PROFILE_VERSION:
            raise ContractError(
                f"latency profile version {version}; this release reads version {LATENCY_PROFILE_VERSION}: run `strata profile` again"
            )
        profile = from_json(data, cls)
        profile.check()
        return profile

    def check(self) -> None:
        """Raises ContractError unless there is something to fit and every figure can be."""
        if not self.points:
            raise ContractError("the latency profile has no points: run `strata profile` again")
        if self.row_multiple < 1 or list(self.row_sizes) != sorted(set(self.row_sizes)):
            raise ContractError(
                f"rowSizes {list(self.row_sizes)} and rowMultiple {self.row_multiple}: increasing sizes and a multiple of at "
                "least 1 are needed"
            )
        unmeasured = sorted({point.format for point in self.points} ^ self.layers.keys())
        if unmeasured:
            raise ContractError(
                f"layers and points do not name the same formats ({', '.join(unmeasured)}): run `strata profile` again"
            )
        for point in (*self.points, *(point for each in self.shared for point in each.points)):
            _check_point(point)

    def without(self, names: Iterable[FormatName]) -> Self | None:
        """What is left when these formats are to be measured again, with all that a step takes beside its layers; None: nothing."""
        left = [name for name in self.layers if name not in set(names)]
        return msgspec.structs.replace(self.of(left), head=(), handling=()) if left else None

    def of(self, names: Iterable[FormatName]) -> Self:
        """With the points of these formats alone."""
        kept = set(names)
        return msgspec.structs.replace(
            self,
            layers={name: count for name, count in self.layers.items() if name in kept},
            kernels=tuple(each for each in self.kernels if each.format in kept),
            points=tuple(each for each in self.points if each.format in kept),
            stored={name: linears for name, linears in self.stored.items() if name in kept},
            shared=tuple(shared for each in self.shared if (shared := each.of(kept)).points),
            leave_one_out={name: error for name, error in self.leave_one_out.items() if name.partition(" ")[0] in kept},
        )

    def with_formats(self, more: "LatencyProfile") -> Self:
        """With what was measured of other formats later; all that is here stays as it is. Of one subject, which whoever measures sees to."""
        return msgspec.structs.replace(
            self,
            layers={**self.layers, **more.layers},
            kernels=(*self.kernels, *more.kernels),
            points=(*self.points, *more.points),
            head=self.head or more.head,
            handling=self.handling or more.handling,
            stored={**self.stored, **more.stored},
        )

    def shared_by(self, ranks: int) -> SharedLayers:
        """Without points where nothing was measured of so many."""
        return next((each for each in self.shared if each.ranks == ranks), SharedLayers(ranks, ()))

    def with_shared(self, more: SharedLayers) -> Self:
        """With these points, in place of what was measured of as many ranks in the same formats."""
        known = self.shared_by(more.ranks)
        kept = known.of(known.formats - more.formats).points
        others = tuple(each for each in self.shared if each.ranks != more.ranks)
        return msgspec.structs.replace(self, shared=(*others, SharedLayers(more.ranks, (*kept, *more.points))))

    def rows(self, tokens: int) -> int:
        """How many rows a step of so many tokens computes."""
        wanted = next((size for size in self.row_sizes if size >= tokens), None)
        return wanted or -(-tokens // self.row_multiple) * self.row_multiple

    def kernel(self, name: FormatName, rows: int) -> str:
        """The kernel that a step of so many rows multiplies with."""
        ranges = [each for each in self.kernels if each.format == name]
        return next((each.kernel for each in ranges if rows <= each.most_rows), ranges[-1].kernel if ranges else "")


def row_sizes(padded: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """(sizes, multiple) from what 1, 2, 3, ... tokens are padded to: sizes where the steps are uneven, then the even step."""
    sizes = sorted(set(padded))
    multiple = sizes[-1] - sizes[-2] if len(sizes) > 1 else 1
    even = next((at for at in reversed(range(1, len(sizes))) if sizes[at] - sizes[at - 1] != multiple), 0)
    return tuple(sizes[: even + 1]) if multiple > 1 else (), multiple


def _version_of(data: bytes | str) -> object:
    """What the file says of itself; of what cannot be read, this release's, so that reading it says what is wrong."""
    try:
        told = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return LATENCY_PROFILE_VERSION
    return told.get("version", LATENCY_PROFILE_VERSION) if isinstance(told, dict) else LATENCY_PROFILE_VERSION


def _check_point(point: LatencyPoint) -> None:
    sizes = (point.sequences, point.tokens, point.past + 1)
    if min(sizes) < 1 or not 0 < point.layer_seconds < float("inf") or not 0 <= point.step_seconds < float("inf"):
        raise ContractError(
            f"a {point.phase} point of {point.sequences} x {point.tokens} tokens after {point.past} took "
            f"{point.layer_seconds} s a layer: sizes and seconds must be positive; run `strata profile` again"
        )
