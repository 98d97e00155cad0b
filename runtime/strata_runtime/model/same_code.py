"""Whether classes of transformers compute the same: it copies forwards from model to model. Used by what stands in for them."""

from inspect import unwrap
from types import CodeType
from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def goes_as_llama(layer: nn.Module) -> bool:
    """Whether a decoder layer is norm, attention, residual, norm, MLP, residual, and nothing else."""
    return is_the_same(unwrap(type(layer).forward), unwrap(LlamaDecoderLayer.forward))


def is_the_same(one: Any, other: Any) -> bool:
    """Whether two functions do the same with the same names."""
    code = getattr(one, "__code__", None)
    return code is not None and _instructions(code, one.__doc__) == _instructions(other.__code__, other.__doc__)


def _instructions(code: CodeType, about: str | None) -> tuple[object, ...]:
    constants = tuple(each for each in code.co_consts if each != about)
    return code.co_code, code.co_names, code.co_varnames, constants
