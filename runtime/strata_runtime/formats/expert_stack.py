"""The experts of a layer as quantized linears: one stack for each matrix of an expert, its buffers [experts, ...].

Made by the loader, expert by expert, in the place of a fused parameter; multiplied by in `model.experts`. Each expert is stored and multiplied
exactly as a linear of its own would be; only where its bytes lie differs: the parts of all experts one after the other, so that a layer takes a few
large pieces of memory and not thousands of small ones.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import FormatName
from strata_runtime.formats.quant_linear import QuantLinear


class ExpertStack(nn.Module):
    """`count` linears of one shape and format, without biases."""

    def __init__(self, count: int, like: QuantLinear) -> None:
        super().__init__()
        self.count = count
        self.format: FormatName = like.format
        for name, buffer in like.named_buffers():
            self.register_buffer(name, buffer.new_empty((count, *buffer.shape)))
        self._kind = type(like)
        self._attributes: dict[str, Any] = {**like.__dict__, "_buffers": {}}  # a plain dict: no module of this one

    def put(self, expert: int, linear: QuantLinear) -> None:
        """Copy the linear's bytes to the expert's place."""
        for name, buffer in linear.named_buffers():
            self.get_buffer(name)[expert].copy_(buffer)

    def linear(self, expert: int) -> QuantLinear:
        """A view of one expert."""
        view = self._kind.__new__(self._kind)
        buffers = {name: None if buffer is None else buffer[expert] for name, buffer in self._buffers.items()}
        view.__dict__ = {**self._attributes, "_buffers": {"bias": None, **buffers}}
        return view


class ExpertProjection(nn.Module):
    """One product of each of `count` experts: the outputs of its matrices side by side (gate and up, or both in one)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.stacks = nn.ModuleList()

    def put(self, expert: int, part: int, linear: QuantLinear) -> None:
        """Parts come in order, at least those of the first expert."""
        if part == len(self.stacks):
            self.stacks.append(ExpertStack(self.count, linear))
        stack = self.stacks[part]
        assert isinstance(stack, ExpertStack)
        stack.put(expert, linear)

    def multiply(self, expert: int, tokens: Tensor) -> Tensor:
        """tokens [M, K] -> [M, N]."""
        outputs = [stack.linear(expert).multiply(tokens) for stack in self.stacks]  # type: ignore[operator]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def dequantized(self, expert: int) -> Tensor:
        """The stored weight as float32 [N, K]."""
        return torch.cat([stack.linear(expert).dequantized() for stack in self.stacks])  # type: ignore[operator]
