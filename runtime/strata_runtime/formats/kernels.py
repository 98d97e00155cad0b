"""The kernels of every format, and the rule that picks one.

`select` is called by the linears on every forward pass. Knows when a kernel runs and when it is the fastest; how it multiplies is in `channel_kernels`,
`group_kernels`, `plane_kernels`, `triton_products` (GPUs) and `float8_kernels`. The table of GPTQ's is in `gptq.kernels`.

The number of tokens chooses only between kernels of equal arithmetic, so that a replay by prefill differs from decode by rounding alone;
activation quantization is a format of the plan, never a silent choice. Equal arithmetic of `int8`, `int4` and `int3`: activations stay in the
compute type and sums are float32. The packed kernels multiply by the float32 value of a weight, the others round it to the compute
type first. Which of them is the fastest `strata_runtime.measuring.measure` times on each device (`measured`); the kernels' own limits, for devices that were
not, come from the table in docs/precision.md, which `python -m benchmarks.format_kernels` prints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_runtime.formats import measured
from strata_runtime.formats.float8 import float8_kernels
from strata_runtime.formats.float8.blocks import BlockFloat8Weight
from strata_runtime.formats.float8.float8 import Float8Weight
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.planes import plane_kernels, triton_products
from strata_runtime.formats.rounded import channel_kernels, group_kernels
from strata_runtime.formats.static8 import static_kernels
from strata_runtime.formats.static8.static_weight import StaticWeight
from strata_runtime.formats.weights import ChannelWeight, GroupWeight, PlanesWeight
from strata_runtime.kernels import native_dense

Arithmetic = Literal["16-bit activations", "8-bit activations"]
W = TypeVar("W", ChannelWeight, GroupWeight, PlanesWeight, Float8Weight, BlockFloat8Weight, StaticWeight, GptqWeight)

ANY_TOKENS = 1 << 62
_GROUP_FORMATS: tuple[FormatName, ...] = ("int4", "int3")


@dataclass(frozen=True)
class Kernel(Generic[W]):
    """`run(tokens [M, K], weight) -> [M, N]`, without bias, if `runs(tokens, weight)`; the fastest up to `most_tokens`."""

    name: str
    format: FormatName
    arithmetic: Arithmetic
    runs: Callable[[Tensor, W], bool]
    run: Callable[[Tensor, W], Tensor]
    most_tokens: int = ANY_TOKENS


def _always(_tokens: Tensor, _weight: object) -> bool:
    return True


CHANNEL_KERNELS: tuple[Kernel[ChannelWeight], ...] = (
    Kernel(
        "int8-packed", "int8", "16-bit activations", channel_kernels.packed_runs, channel_kernels.packed, most_tokens=16
    ),
    Kernel("int8-converted", "int8", "16-bit activations", _always, channel_kernels.converted),
    Kernel("w8a8-native", "w8a8", "8-bit activations", channel_kernels.native_runs, channel_kernels.native),
    Kernel("w8a8-int-mm", "w8a8", "8-bit activations", channel_kernels.int_mm_runs, channel_kernels.int_mm),
    Kernel("w8a8-reference", "w8a8", "8-bit activations", _always, channel_kernels.int8_reference),
)
GROUP_KERNELS: tuple[Kernel[GroupWeight], ...] = tuple(
    kernel
    for name in _GROUP_FORMATS
    for kernel in (
        Kernel(
            f"{name}-native",
            name,
            "16-bit activations",
            group_kernels.native_runs,
            group_kernels.native,
            most_tokens=48,
        ),
        Kernel(f"{name}-decoded", name, "16-bit activations", group_kernels.native_runs, group_kernels.decoded),
        Kernel(
            f"{name}-packed",
            name,
            "16-bit activations",
            group_kernels.packed_runs,
            group_kernels.packed,
            most_tokens=48,
        ),
        Kernel(f"{name}-dequantized", name, "16-bit activations", _always, group_kernels.dequantized),
    )
)
PLANE_KERNELS: tuple[Kernel[PlanesWeight], ...] = (
    *(
        kernel
        for name in ANY_PRECISION.values()
        for kernel in (
            Kernel(
                f"{name}-native",
                name,
                "16-bit activations",
                plane_kernels.native_runs,
                plane_kernels.native,
                most_tokens=64,
            ),
            Kernel(f"{name}-decoded", name, "16-bit activations", plane_kernels.native_runs, plane_kernels.decoded),
            Kernel[PlanesWeight](
                f"{name}-triton",
                name,
                "16-bit activations",
                triton_products.product_runs,
                triton_products.product,
                most_tokens=triton_products.MOST_TOKENS,
            ),
            Kernel[PlanesWeight](
                f"{name}-triton-dequantized",
                name,
                "16-bit activations",
                triton_products.product_runs,
                triton_products.dequantized,
            ),
            Kernel(f"{name}-dequantized", name, "16-bit activations", _always, plane_kernels.dequantized),
        )
    ),
    Kernel("any4_a8-native", "any4_a8", "8-bit activations", plane_kernels.native_int8_runs, plane_kernels.native_int8),
    Kernel("any4_a8-reference", "any4_a8", "8-bit activations", _always, plane_kernels.reference_int8),
)
STATIC_KERNELS: tuple[Kernel[StaticWeight], ...] = (
    Kernel(
        "w8a8_static-native",
        "w8a8_static",
        "8-bit activations",
        static_kernels.native_runs,
        static_kernels.native,
    ),
    Kernel("w8a8_static-int-mm", "w8a8_static", "8-bit activations", static_kernels.int_mm_runs, static_kernels.int_mm),
    Kernel("w8a8_static-reference", "w8a8_static", "8-bit activations", _always, static_kernels.reference_product),
)
FLOAT8_KERNELS: tuple[Kernel[Float8Weight], ...] = (
    Kernel("fp8_e4m3-converted", "fp8_e4m3", "16-bit activations", _always, float8_kernels.converted),
    Kernel("fp8_a8-scaled-mm", "fp8_a8", "8-bit activations", float8_kernels.scaled_mm_runs, float8_kernels.scaled_mm),
    Kernel("fp8_a8-reference", "fp8_a8", "8-bit activations", _always, float8_kernels.reference),
)


BLOCK_FLOAT8_KERNELS: tuple[Kernel[BlockFloat8Weight], ...] = (
    Kernel("fp8_block-converted", "fp8_block", "16-bit activations", _always, float8_kernels.converted),
)


def select(kernels: tuple[Kernel[W], ...], format_name: FormatName, tokens: Tensor, weight: W) -> Kernel[W]:
    """The fastest kernel of the format that runs here: as measured on the tokens' device, else by the kernels' own limits.

    Of those the first that is meant for so many tokens; the last of each format always is.
    """
    count = tokens.shape[0]
    choices = _of_format(kernels, format_name)
    name = measured.fastest(format_name, tokens.dtype, count, tokens.device)
    if name is not None:
        for kernel in choices:
            if kernel.name == name and kernel.runs(tokens, weight):
                return kernel
    for kernel in choices:
        if count <= kernel.most_tokens and kernel.runs(tokens, weight):
            return kernel
    raise AssertionError(f"no kernel of {format_name} takes any weight")


def packed_rows(dtype: torch.dtype, threads: int) -> dict[FormatName, int]:
    """Up to how many tokens this processor multiplies weights as they are stored, by kernels that keep no memory; of formats with a choice, those that
    were measured here alone.

    Those are the kernels with limits of their own. Beyond, weights are brought back to `dtype` for oneDNN, which keeps a kernel for every number of rows.
    """
    packs = native_dense.takes(dtype, torch.device("cpu"))
    tables: tuple[tuple[Kernel[Any], ...], ...] = (CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS)
    limited = [kernel for table in tables for kernel in table if kernel.most_tokens < ANY_TOKENS]
    steps, names = measured.steps_on_cpu(dtype, threads), {kernel.name for kernel in limited}
    found = {name: _most_tokens(steps[name], names) for name in {kernel.format for kernel in limited} if name in steps}
    return found | dict.fromkeys(("dense", "int8"), ANY_TOKENS) if packs else found


def _most_tokens(steps: measured.Steps, names: set[str]) -> int:
    """Up to how many tokens one of the kernels called `names` is taken."""
    if steps[-1][1] in names:
        return ANY_TOKENS
    return max((most for most, name in steps if name in names), default=0)


_BY_FORMAT: dict[tuple[int, FormatName], tuple[tuple[Kernel[Any], ...], tuple[Kernel[Any], ...]]] = {}


def _of_format(kernels: tuple[Kernel[W], ...], format_name: FormatName) -> tuple[Kernel[W], ...]:
    """Found once for each table of kernels: on every forward pass microseconds count. The table itself is kept with what was found in it."""
    found = _BY_FORMAT.get((id(kernels), format_name))
    if found is None:
        found = (kernels, tuple(kernel for kernel in kernels if kernel.format == format_name))
        _BY_FORMAT[id(kernels), format_name] = found
    return found[1]
