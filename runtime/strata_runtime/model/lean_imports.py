"""transformers without what this runtime never runs of it: torch's compiler, attention that is compiled, distribution over processes.

Called when `strata_runtime.model` is imported, so before any module of it imports transformers. All of that is imported there for the sake of a few
decorators and isinstance checks; with sympy and triton it is 1,100 modules, 130 MB and half of a slot's start. Who compiles later
imports the compiler then.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

_SHARED = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")
_UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")
_NUMBERS = frozenset({torch.arange, torch.tensor})
_COMPILER = "torch._dynamo"
_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"


def import_lean() -> None:
    """Import what all models of transformers share. Where somebody has done so already, or another version wants more, the whole is there."""
    if not sys.modules.keys().isdisjoint(_SHARED):
        return
    utils = importlib.import_module("transformers.utils")
    for module in (utils, importlib.import_module("transformers.utils.import_utils")):
        for name in _UNUSED:
            if hasattr(module, name):
                setattr(module, name, lambda: False)
    with contextlib.suppress(ImportError, AttributeError), without_compiler():
        for name in _SHARED:
            importlib.import_module(name)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Within it the compiler's module is a stand-in, whose decorators change nothing. Those of torch's own functions that meet it for the first time stay
    so: a process that compiles afterwards would compile them too.
    """
    if _COMPILER in sys.modules:
        yield
        return
    compiler, masks = ModuleType(_COMPILER), ModuleType(_MASKS)
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(compiler, name, _as_it_is)
    masks.TransformGetItemToIndex = _later(_MASKS, "TransformGetItemToIndex")  # type: ignore[attr-defined]
    sys.modules |= {_COMPILER: compiler, _MASKS: masks}
    torch._dynamo = compiler  # noqa: SLF001  where `import torch._dynamo` leaves it
    try:
        yield
    finally:
        for name in (_MASKS, _COMPILER):
            del sys.modules[name]
        del torch._dynamo  # noqa: SLF001


class SmallOnCpu(TorchFunctionMode):
    """Within it numbers that are written or counted lie on the processor unless it is told where, and what has no memory has no logarithm. Of these a
    model on the meta device computes its frequencies, scales and decays: without memory by torch's references in Python, which import sympy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _NUMBERS and named.get("device") is None:
            named = {**named, "device": "cpu"}
        if func is torch.log and args[0].is_meta:
            return args[0]
        return func(*args, **named)


def _as_it_is(function: T | None = None, *_: Any, **__: Any) -> T | Callable[[T], T]:
    """A decorator, with or without arguments."""
    return function if function is not None else lambda given: given


def _later(module: str, name: str) -> Callable[..., Any]:
    """What is called so in the real module, when it is called."""

    def call(*positional: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*positional, **named)

    return call
