"""GPTQ weights in the layout of `humming-kernels` (the `cuda` extra): repacked once, checked, multiplied in place of bit-planes.

Asked by `gptq.kernels` when a linear multiplies for the first time, and by `kernel_timing`, which decides whether these kernels are the fastest of
a GPU. **They have not run on a GPU yet**, so nothing is believed: a weight is taken only after its products, at both ends of every interval of
tokens that has a kernel of its own, were those of the reference. Importing this module imports nothing of the library.

The repacked weight replaces the planes: it cannot be cut, nor change its bits. Called as of humming-kernels 0.1.19: `humming.transform`,
`humming.forward`, `humming.tune`; kernels are compiled by NVRTC at their first use and kept in `~/.humming/cache`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from strata_runtime.formats.agreement import disagreement, size_of_sums
from strata_runtime.formats.gptq.bitstream import pack_columns
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.planes.planes import unpack_planes

# A kernel for each interval of tokens, chosen for its upper end; the last one also beyond. Left alone, the library compiles up to a hundred.
INTERVAL_ENDS = (8, 16, 32, 64, 128, 256, 512)
CHECKED_COUNTS = (1, *(count for end in INTERVAL_ENDS for count in (end, end + 1)))
WHOLE_TILES = 128  # outputs and inputs must be multiples: what every kernel of every capability takes
GROUPS = (32, 64, 128)
_WEIGHTS_AT_A_TIME = 1 << 22
_LOCKS = 2048  # int32, as the library's own layer has
_UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class UniformWeight:
    """A weight as the library takes it: (code - zero) * scale.

    words: int32 [N, K * bits / 32], a row's codes as a little-endian stream of bits; scales: [N, G] in the compute type; zeros: int32
    [N * bits / 32, G], streams down the outputs, or None: 2^(bits - 1) everywhere.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits


class Library(Protocol):
    """What is asked of humming-kernels. Tests give others of the same interface."""

    def repacked(self, weight: UniformWeight) -> tuple[dict[str, Tensor], object]:
        """The tensors of its own layout by name, and whatever else `product` wants to know of them."""

    def product(self, tokens: Tensor, parts: Mapping[str, Tensor], layout: Any) -> Tensor:
        """tokens [M, K], M at least 1, contiguous -> [M, N]."""


@dataclass(frozen=True)
class RepackedWeight:
    """Stands where a GptqWeight stood. `parts` and `layout` are the library's; order: as of GptqWeight."""

    parts: dict[str, Tensor]
    layout: object
    library: Library = field(repr=False)
    shape: tuple[int, int]
    dtype: torch.dtype  # of the tokens it multiplies
    order: Tensor | None = None

    def gathered(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] with their inputs in the order of the repacked weight."""
        return tokens if self.order is None else tokens.index_select(1, self.order)

    def product(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] as `gathered` gives them -> [M, N]."""
        if not tokens.shape[0]:
            return tokens.new_empty(0, self.shape[0])
        return self.library.product(tokens.contiguous(), self.parts, self.layout)

    def dequantized(self) -> Tensor:
        """float32 [N, K], inputs in the model's own order: products with unit vectors, so rounded to the compute type."""
        out_features, in_features = self.shape
        device = next(iter(self.parts.values())).device
        out = torch.empty(out_features, in_features, device=device)
        for start in range(0, in_features, INTERVAL_ENDS[-1]):
            stop = min(start + INTERVAL_ENDS[-1], in_features)
            units = torch.zeros(stop - start, in_features, dtype=self.dtype, device=device)
            units[:, start:stop] = torch.eye(stop - start, dtype=self.dtype, device=device)
            out[:, start:stop] = self.product(units).t()
        return out if self.order is None else out[:, torch.argsort(self.order.long())]


def refusal(weight: GptqWeight, dtype: torch.dtype) -> str | None:
    """Why the library cannot hold this weight, or would multiply by another one; None if it can."""
    out_features, in_features = weight.out_features, weight.in_features
    if dtype not in {torch.float16, torch.bfloat16}:
        return f"it multiplies float16 and bfloat16, and the compute type is {dtype}"
    if out_features % WHOLE_TILES or in_features % WHOLE_TILES:
        return f"a weight of {out_features} x {in_features} is not whole tiles of {WHOLE_TILES}"
    if weight.group not in GROUPS:
        return f"groups of {weight.group} inputs are not of {', '.join(map(str, GROUPS))}"
    if int(weight.zeros.max()) >= 1 << weight.bits:
        return f"zeros reach {int(weight.zeros.max())}, and {weight.bits} bits hold {(1 << weight.bits) - 1}"
    if not torch.equal(weight.scales.to(dtype).float(), weight.scales.float()):
        return f"its scales must be {dtype}, and would be rounded"
    return None


def uniform(weight: GptqWeight, dtype: torch.dtype) -> UniformWeight:
    """The same weight in the library's words, some rows at a time."""
    out_features, in_features = weight.out_features, weight.in_features
    words = torch.empty(
        out_features, in_features * weight.bits // 32, dtype=torch.int32, device=weight.planes[0].device
    )
    step = max(1, _WEIGHTS_AT_A_TIME // in_features)
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        codes = unpack_planes([plane[rows] for plane in weight.planes], in_features)
        words[rows] = pack_columns(codes.t(), weight.bits)
    centered = bool((weight.zeros == 1 << (weight.bits - 1)).all())
    zeros = None if centered else pack_columns(weight.zeros, weight.bits).t().contiguous()
    return UniformWeight(words, weight.scales.to(dtype), zeros, weight.bits, weight.group)


def repack(
    weight: GptqWeight, dtype: torch.dtype, library: Library, reference: Callable[[Tensor, GptqWeight], Tensor]
) -> RepackedWeight | str:
    """The weight in the library's layout, or why it keeps its planes: the library cannot hold it, fails, or computes something else.

    `reference(tokens, weight)`: the product in plain torch. Takes three times the weight's memory meanwhile.
    """
    reason = refusal(weight, dtype)
    if reason is not None:
        return reason
    shape = (weight.out_features, weight.in_features)
    try:
        parts, layout = library.repacked(uniform(weight, dtype))
        repacked = RepackedWeight(parts, layout, library, shape, dtype, weight.order)
        return _difference(repacked, weight, reference) or repacked
    except Exception as error:  # noqa: BLE001 -- it compiles and launches code that no one here has run: whatever it raises, planes stay
        return f"it failed: {type(error).__name__}: {str(error).strip()[:300]}"


def _difference(
    repacked: RepackedWeight, weight: GptqWeight, reference: Callable[[Tensor, GptqWeight], Tensor]
) -> str | None:
    """Compared at both ends of every interval. Tokens are alike in size, so that every input and group counts."""
    in_features, device = weight.in_features, weight.planes[0].device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(CHECKED_COUNTS[-1], in_features, generator=generator).to(device, repacked.dtype)
    expected = reference(tokens, weight)
    size = size_of_sums(tokens, repacked.shape, _WEIGHTS_AT_A_TIME, weight.stored_rows)
    for count in CHECKED_COUNTS:
        reason = disagreement(repacked.product(tokens[:count]), expected[:count], size[:count], in_features)
        if reason is not None:
            return f"it computes something else for {count} tokens: {reason}"
    return None


@cache
def installed() -> Library | str:
    """The library of this machine, or why there is none. Importing it costs a second."""
    if torch.version.cuda is None or find_spec("humming") is None:
        return "humming-kernels is not installed"
    try:
        return _Humming()
    except Exception as error:  # noqa: BLE001 -- as in `repack`
        return f"humming-kernels does not load: {type(error).__name__}: {str(error).strip()[:300]}"


@dataclass(frozen=True)
class _Layout:
    config: Any  # humming.config.LayerConfig
    tuning: str  # JSON: [over so many tokens, up to so many, how its kernel is built] for every interval


class _Humming:
    """humming-kernels itself."""

    def __init__(self) -> None:
        from humming.forward import humming_forward  # noqa: PLC0415 -- starts compilers: only where it is asked for
        from humming.schema import HummingWeightSchema  # noqa: PLC0415
        from humming.transform import prepare_and_transform_humming_tensors  # noqa: PLC0415
        from humming.tune import get_heuristics_config  # noqa: PLC0415

        self._forward, self._schema = humming_forward, HummingWeightSchema
        self._transformed, self._tuned = prepare_and_transform_humming_tensors, get_heuristics_config

    def repacked(self, weight: UniformWeight) -> tuple[dict[str, Tensor], _Layout]:
        tensors = {"weight": weight.words, "weight_scale": weight.scales}
        if weight.zeros is not None:
            tensors["zero_point"] = weight.zeros
        schema = self._schema(
            b_dtype=f"uint{weight.bits}",
            weight_scale_group_size=weight.group,
            has_zero_point=weight.zeros is not None,
        )
        out_features, in_features = weight.shape
        device = weight.words.device
        config, parts = self._transformed(
            tensors, out_features, in_features, schema, torch_dtype=weight.scales.dtype, device=device
        )
        kernels = [self._tuned(config, shape_m=end, device=device) for end in INTERVAL_ENDS]
        starts, ends = (0, *INTERVAL_ENDS[:-1]), (*INTERVAL_ENDS[:-1], _UNBOUNDED)
        tuning = json.dumps([list(interval) for interval in zip(starts, ends, kernels, strict=True)])
        # Of each weight its own: kernels of two may run at the same time.
        locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
        return {**parts, "locks": locks}, _Layout(config, tuning)

    def product(self, tokens: Tensor, parts: Mapping[str, Tensor], layout: _Layout) -> Tensor:
        result: Tensor = self._forward(layout.config, inputs=tokens, tuning_config=layout.tuning, **parts)
        return result
