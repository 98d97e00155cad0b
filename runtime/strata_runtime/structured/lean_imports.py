"""xgrammar without torch, which it imports for a number and the types of its signatures: 1.7 s and 290 MB of a process that only tries grammars.

Called by `trial` before anything imports xgrammar. Its masks are NumPy's arrays here; who wants tensors of it, where torch is a stand-in, gets an error.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_FOR_TRANSFORMERS = "xgrammar.contrib.hf"  # which generates with torch


def import_xgrammar() -> None:
    """Where torch is there already, or another version wants more of it, both are imported whole. Raises ImportError where there is no xgrammar."""
    if "torch" in sys.modules or "xgrammar" in sys.modules:
        importlib.import_module("xgrammar")
        return
    before = set(sys.modules)
    try:
        _import_lean()
    except (ImportError, AttributeError, TypeError):
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in {"xgrammar", "tvm_ffi", "torch"}:
                sys.modules.pop(name, None)
        importlib.import_module("xgrammar")


def _import_lean() -> None:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast  # noqa: F401, PLC0415 (looks whether there is a torch)

    modules: dict[str, Any] = sys.modules
    stand_in = ModuleType("torch")
    stand_in.int32, stand_in.Tensor, stand_in.tensor = "int32", Any, lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        modules["torch"] = None  # there is none: tvm_ffi asks
        importlib.import_module("tvm_ffi")
        modules |= {"torch": stand_in, _FOR_TRANSFORMERS: ModuleType(_FOR_TRANSFORMERS)}
        importlib.import_module("xgrammar")
    finally:
        del modules["torch"]
        modules.pop(_FOR_TRANSFORMERS, None)
