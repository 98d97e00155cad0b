"""A linear operator at the precision that the plan gives it.

`make_linear` is called by the loader for every linear of a layer while its weight streams in; `stored_bytes_of` by whoever compares
planned with real memory. Knows formats and shapes; the kernels know how to multiply.
"""

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import (
    BITS_OF_FORMAT,
    FORMAT_NAMES,
    FormatName,
    group_size,
    padded_in_features,
)
from strata_runtime.precision import packing, reference
from strata_runtime.precision.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.precision.quantizers import quantize_channels, quantize_groups

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class QuantLinear(nn.Module):
    """[..., K] -> [..., N] in the compute type; the weight is stored once, in integers, as `contract.formats` counts it."""

    def __init__(self, out_features: int, in_features: int, compute_dtype: torch.dtype, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.compute_dtype = compute_dtype
        self.register_buffer("bias", None if bias is None else bias.detach().to(compute_dtype))
        self.bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features)
        return self.multiply(tokens).view(*inputs.shape[:-1], self.out_features)

    def multiply(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] -> [M, N]."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The stored weight as float32 [N, K]."""
        raise NotImplementedError


class ChannelLinear(QuantLinear):
    """Formats `int8` and `w8a8`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(weight.shape[0], weight.shape[1], compute_dtype, bias)
        self.format: FormatName = format_name
        stored = quantize_channels(weight, torch.float32 if format_name == "w8a8" else compute_dtype)
        self.register_buffer("codes", stored.codes)
        self.register_buffer("scales", stored.scales)
        self.codes: Tensor
        self.scales: Tensor

    def multiply(self, tokens: Tensor) -> Tensor:
        if self.format == "w8a8":
            return reference.multiply_quantized(tokens, self.codes, self.scales, self.bias)
        return reference.multiply(tokens, self.dequantized(), self.bias)

    def dequantized(self) -> Tensor:
        return reference.dequantize_channels(self.codes, self.scales)


class GroupLinear(QuantLinear):
    """Formats `int4` and `int3`. `planes`: the nibbles, or the two bit planes (see `packing`)."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(weight.shape[0], weight.shape[1], compute_dtype, bias)
        self.format: FormatName = format_name
        self.group = group_size(self.in_features)
        self.columns = padded_in_features(self.in_features)
        padded = nn.functional.pad(weight, (0, self.columns - self.in_features))
        stored = quantize_groups(padded, BITS_OF_FORMAT[format_name], self.group, compute_dtype)
        nibbles = packing.pack_nibbles(stored.codes)
        if format_name == "int4":
            self.register_buffer("nibbles", nibbles)
        else:
            two, one = packing.split_planes(nibbles, self.out_features, self.columns)
            self.register_buffer("two_bits", two)
            self.register_buffer("one_bit", one)
        self.register_buffer(
            "scales_and_zeros", torch.stack((stored.scales, stored.zeros), 2).transpose(0, 1).contiguous()
        )
        self.nibbles: Tensor
        self.two_bits: Tensor
        self.one_bit: Tensor
        self.scales_and_zeros: Tensor

    def multiply(self, tokens: Tensor) -> Tensor:
        return reference.multiply(tokens, self.dequantized(), self.bias)

    def dequantized(self) -> Tensor:
        codes = packing.unpack_nibbles(self._all_nibbles(), self.out_features, self.columns)
        return reference.dequantize_groups(codes, self.scales_and_zeros)[:, : self.in_features]

    def _all_nibbles(self) -> Tensor:
        if self.format == "int4":
            return self.nibbles
        parts = [
            packing.join_planes(
                self.two_bits[packing.byte_range(part, self.columns, bits=2)],
                self.one_bit[packing.byte_range(part, self.columns, bits=1)],
                part.blocks,
            )
            for part in packing.segments(self.out_features)
        ]
        return torch.cat(parts)


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
    return kind(weight.detach(), bias, format, compute_dtype)


def stored_bytes_of(module: nn.Module) -> int:
    """Bytes of all that the module keeps: parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _dense(weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> nn.Linear:
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(compute_dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(compute_dtype), requires_grad=False)
    return linear


def _check(weight: Tensor, bias: Tensor | None, format_name: FormatName, compute_dtype: torch.dtype, name: str) -> None:
    if format_name not in FORMAT_NAMES:
        raise PrecisionError(f"{name}: format {format_name!r} is unknown; use one of {', '.join(FORMAT_NAMES)}")
    if compute_dtype not in COMPUTE_DTYPES:
        raise PrecisionError(f"{name}: compute type {compute_dtype} is not one of bfloat16, float16, float32")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise PrecisionError(
            f"{name}: weight {weight.dtype} {list(weight.shape)} must be a floating-point matrix [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise PrecisionError(f"{name}: bias {list(bias.shape)} must hold one value per output, [{weight.shape[0]}]")
    for kind, values in (("weight", weight), ("bias", bias)):
        if values is not None and not (finite := torch.isfinite(values)).all():
            broken = int(values.numel() - finite.sum())
            raise WeightNotFiniteError(
                f"{name}: {broken} of {values.numel()} values of the {kind} are NaN or infinite; every value must be finite. "
                "The checkpoint is damaged or was saved from a diverged run: load another copy."
            )
