"""Libraries of the same interface as humming-kernels, in plain torch: one that is right, and some that are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strata_runtime.formats.gptq.humming_kernels import UniformWeight


def codes_of(weight: UniformWeight) -> Tensor:
    """int64 [N, K], read bit by bit from the description of the words alone: a row is a little-endian stream of bits."""
    return _from_stream(weight.words, weight.bits)


def zeros_of(weight: UniformWeight) -> Tensor:
    """int64 [N, G]; streams run down the outputs."""
    if weight.zeros is None:
        return torch.full(weight.scales.shape, 1 << (weight.bits - 1))
    return _from_stream(weight.zeros.t(), weight.bits).t()


def values_of(weight: UniformWeight, zeros: Tensor | None = None) -> Tensor:
    """float32 [N, K]."""
    steps = codes_of(weight) - (zeros_of(weight) if zeros is None else zeros).repeat_interleave(weight.group, dim=1)
    return steps * weight.scales.float().repeat_interleave(weight.group, dim=1)


def _from_stream(words: Tensor, bits: int) -> Tensor:
    flat = words.long() & 0xFFFFFFFF
    stream = torch.stack([(flat >> place) & 1 for place in range(32)], dim=2).flatten(1)
    return (stream.view(words.shape[0], -1, bits) << torch.arange(bits)).sum(dim=2)


@dataclass
class Right:
    """Keeps the values of a weight; `products` says how many tokens each product had."""

    products: list[int] = field(default_factory=list)

    def repacked(self, weight: UniformWeight) -> tuple[dict[str, Tensor], object]:
        return {"values": values_of(weight).to(weight.scales.dtype)}, None

    def product(self, tokens: Tensor, parts: Mapping[str, Tensor], layout: object) -> Tensor:
        assert tokens.is_contiguous()
        self.products.append(len(tokens))
        return torch.nn.functional.linear(tokens, parts["values"])


class ZerosLessOne(Right):
    """As a reader of version 1 of the format that forgets to add one."""

    def repacked(self, weight: UniformWeight) -> tuple[dict[str, Tensor], object]:
        return {"values": values_of(weight, zeros_of(weight) - 1).to(weight.scales.dtype)}, None


class WrongBeyond(Right):
    """One kernel of several loses a row of tokens."""

    def product(self, tokens: Tensor, parts: Mapping[str, Tensor], layout: object) -> Tensor:
        out = super().product(tokens, parts, layout)
        return out.index_fill(0, torch.tensor(len(out) - 1), 0.0) if len(out) > 33 else out


class DoesNotCompile(Right):
    def product(self, tokens: Tensor, parts: Mapping[str, Tensor], layout: object) -> Tensor:
        raise RuntimeError("NVRTCCompiler failed with exit code 6")


class OutOfMemory(Right):
    def repacked(self, weight: UniformWeight) -> tuple[dict[str, Tensor], object]:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")
