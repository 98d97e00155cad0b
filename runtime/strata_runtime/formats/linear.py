"""A linear operator at the precision that the plan gives it.

`make_linear` is called by the loader for every linear of a layer while its weight streams in; `stored_bytes_of` by whoever compares
planned with real memory. Knows formats and shapes; the kernels know how to multiply.
"""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, ComputeType, FormatName
from strata_runtime.formats.any_precision import quantize_any
from strata_runtime.formats.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.float8.float8 import FLOAT8
from strata_runtime.formats.float8.float8_linear import Float8Linear
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.rounded.rounded_linear import GroupLinear, channel_linear
from strata_runtime.ranges import Range

GROUP_HEADROOM = 4  # the zero of a group may lie so many times beyond its largest value
COMPUTE_DTYPES: dict[ComputeType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def make_linear(
    weight: Tensor,
    bias: Tensor | None,
    format: FormatName,  # noqa: A002 -- the plan's own word
    compute_dtype: torch.dtype,
    *,
    name: str = "linear",
    columns: Range | None = None,
) -> nn.Module:
    """The operator `inputs @ weight.T + bias` with its weight stored in `format`.

    `columns`: it has these inputs alone; what a format keeps of a row (scales, centroids) is of the whole row.

    weight: [N, K] of any floating type, bias: [N] or None, on the device where the module will live. Both may be freed afterwards.
    `name` only appears in errors. Raises WeightNotFiniteError for NaN or infinity, PrecisionError for a shape, type or format
    that cannot be.
    """
    if format not in MAKERS:
        raise PrecisionError(
            f"{name}: format {format!r} cannot be made of a weight alone; use one of {', '.join(MAKERS)}"
        )
    check_weight(weight, bias, format, compute_dtype, name)
    stored_bias = None if bias is None else bias.detach().to(compute_dtype)
    if columns is None:
        return MAKERS[format](weight.detach(), stored_bias, format, compute_dtype)
    if format not in PART_MAKERS:
        raise PrecisionError(
            f"{name}: a weight in {format} is not cut by its inputs, as ranks of a stage need it; use one of {', '.join(PART_MAKERS)}"
        )
    return PART_MAKERS[format](weight.detach(), stored_bias, format, compute_dtype, columns)


def stored_bytes_of(module: nn.Module) -> int:
    """Bytes of all that the module keeps: parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _dense(weight: Tensor, bias: Tensor | None, _format_name: FormatName, compute_dtype: torch.dtype) -> nn.Linear:
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.to(compute_dtype).contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _dense_part(
    weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype, columns: Range
) -> nn.Linear:
    return _dense(weight[:, slice(*columns)], bias, format_name, compute_dtype)


def _any(
    weight: Tensor,
    bias: Tensor | None,
    format_name: FormatName,
    compute_dtype: torch.dtype,
    columns: Range | None = None,
) -> AnyLinear:
    bits = BITS_OF_FORMAT[format_name]
    whole = quantize_any(weight, bits).at(bits, compute_dtype)
    return AnyLinear(whole if columns is None else whole.part(None, columns), bias, format_name)


Maker = Callable[[Tensor, Tensor | None, FormatName, torch.dtype], nn.Module]
# The formats that a weight alone can be stored in while it streams in: weight [N, K], bias [N] in the compute type or None -> module.
MAKERS: dict[FormatName, Maker] = {
    "dense": _dense,
    "int8": channel_linear,
    "w8a8": channel_linear,
    "int4": GroupLinear,
    "int3": GroupLinear,
    **dict.fromkeys(FLOAT8, Float8Linear),
    **dict.fromkeys(ANY_PRECISION.values(), _any),
    "any4_a8": _any,
}
PartMaker = Callable[[Tensor, Tensor | None, FormatName, torch.dtype, Range], nn.Module]
# Those whose weights may be cut by inputs.
PART_MAKERS: dict[FormatName, PartMaker] = {
    "dense": _dense_part,
    **dict.fromkeys(("int8", "w8a8"), channel_linear),
    **dict.fromkeys(("int4", "int3"), GroupLinear),
    "fp8_e4m3": Float8Linear,
    **dict.fromkeys(ANY_PRECISION.values(), _any),
}


def check_weight(
    weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype, name: str
) -> None:
    """Raises PrecisionError for what no linear of this format can be made of."""
    if compute_dtype not in COMPUTE_DTYPES.values():
        raise PrecisionError(f"{name}: compute type {compute_dtype} is not one of bfloat16, float16, float32")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise PrecisionError(
            f"{name}: weight {weight.dtype} {list(weight.shape)} must be a floating-point matrix [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise PrecisionError(f"{name}: bias {list(bias.shape)} must hold one value per output, [{weight.shape[0]}]")
    limit = torch.finfo(compute_dtype).max / (1 if format_name == "dense" else GROUP_HEADROOM)
    cure = "compute in bfloat16 or float32"
    if MAKERS.get(format_name) is _any:  # their centroids are float16 first, whatever the compute type
        limit, cure = torch.finfo(torch.float16).max, "use another format"
    for kind, values in (("weight", weight), ("bias", bias)):
        if values is None:
            continue
        # The extremes show NaN and infinity too and, unlike `isfinite`, need no second matrix while a checkpoint streams in.
        low, high = (extreme.item() for extreme in values.aminmax())
        if not (isfinite(low) and isfinite(high)):
            broken = int((~torch.isfinite(values)).sum())
            raise WeightNotFiniteError(
                f"{name}: {broken} of {values.numel()} values of the {kind} are NaN or infinite; every value must be finite. "
                "The checkpoint is damaged or was saved from a diverged run: load another copy."
            )
        if max(high, -low) > limit:
            raise PrecisionError(
                f"{name}: the {kind} reaches {max(high, -low):g}, and {format_name} in {compute_dtype} holds at most {limit:g}; {cure}."
            )
