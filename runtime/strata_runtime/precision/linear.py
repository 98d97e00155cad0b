"""A linear operator at the precision that the plan gives it.

`make_linear` is called by the loader for every linear of a layer while its weight streams in; `stored_bytes_of` by whoever compares
planned with real memory. Knows formats and shapes; the kernels know how to multiply.
"""

from math import isfinite

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import FORMAT_NAMES, ComputeType, FormatName
from strata_runtime.precision.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.precision.kernels import CHANNEL_KERNELS, GROUP_KERNELS, select
from strata_runtime.precision.quantizers import quantize_channels
from strata_runtime.precision.weights import ChannelWeight, GroupWeight, store_groups

GROUP_HEADROOM = 4  # the zero of a group may lie so many times beyond its largest value
COMPUTE_DTYPES: dict[ComputeType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class QuantLinear(nn.Module):
    """[..., K] -> [..., N] in the compute type; the weight is stored once, in integers, as `contract.formats` counts it."""

    def __init__(self, shape: tuple[int, int], format_name: FormatName, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.format: FormatName = format_name
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features)
        out = self.multiply(tokens)
        if self.bias is not None:
            out += self.bias
        return out.view(*inputs.shape[:-1], self.out_features)

    def multiply(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] -> [M, N], without the bias."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The stored weight as float32 [N, K]."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


class ChannelLinear(QuantLinear):
    """Formats `int8` and `w8a8`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype
    ) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), format_name, bias)
        stored = quantize_channels(weight, torch.float32 if format_name == "w8a8" else compute_dtype)
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", stored.codes)
        self.register_buffer("scales", stored.scales)

    @property
    def stored(self) -> ChannelWeight:
        return ChannelWeight(self.codes, self.scales)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(CHANNEL_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


class GroupLinear(QuantLinear):
    """Formats `int4` and `int3`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype
    ) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), format_name, bias)
        stored = store_groups(weight, format_name, compute_dtype)
        self.columns = stored.columns
        self.plane_names = tuple(f"plane_{index}" for index in range(len(stored.planes)))
        for name, plane in zip(self.plane_names, stored.planes, strict=True):
            self.register_buffer(name, plane)
        self.scales_and_zeros: Tensor
        self.register_buffer("scales_and_zeros", stored.scales_and_zeros)

    @property
    def stored(self) -> GroupWeight:
        planes = tuple(self.get_buffer(name) for name in self.plane_names)
        return GroupWeight(planes, self.scales_and_zeros, self.in_features, self.columns)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(GROUP_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


def make_linear(
    weight: Tensor,
    bias: Tensor | None,
    format: FormatName,  # noqa: A002 -- the plan's own word
    compute_dtype: torch.dtype,
    *,
    name: str = "linear",
) -> nn.Module:
    """The operator `inputs @ weight.T + bias` with its weight stored in `format`.

    weight: [N, K] of any floating type, bias: [N] or None, on the device where the module will live. Both may be freed afterwards.
    `name` only appears in errors. Raises WeightNotFiniteError for NaN or infinity, PrecisionError for a shape, type or format
    that cannot be.
    """
    _check(weight, bias, format, compute_dtype, name)
    if format == "dense":
        return _dense(weight, bias, compute_dtype)
    kind = ChannelLinear if format in {"int8", "w8a8"} else GroupLinear
    stored_bias = None if bias is None else bias.detach().to(compute_dtype)
    return kind(weight.detach(), stored_bias, format, compute_dtype)


def stored_bytes_of(module: nn.Module) -> int:
    """Bytes of all that the module keeps: parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _dense(weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> nn.Linear:
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(compute_dtype).contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(compute_dtype), requires_grad=False)
    return linear


def _check(weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype, name: str) -> None:
    if format_name not in FORMAT_NAMES:
        raise PrecisionError(f"{name}: format {format_name!r} is unknown; use one of {', '.join(FORMAT_NAMES)}")
    if compute_dtype not in COMPUTE_DTYPES.values():
        raise PrecisionError(f"{name}: compute type {compute_dtype} is not one of bfloat16, float16, float32")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise PrecisionError(
            f"{name}: weight {weight.dtype} {list(weight.shape)} must be a floating-point matrix [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise PrecisionError(f"{name}: bias {list(bias.shape)} must hold one value per output, [{weight.shape[0]}]")
    limit = torch.finfo(compute_dtype).max / (1 if format_name == "dense" else GROUP_HEADROOM)
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
                f"{name}: the {kind} reaches {max(high, -low):g}, and {format_name} in {compute_dtype} holds at most {limit:g}; "
                "compute in bfloat16 or float32."
            )
