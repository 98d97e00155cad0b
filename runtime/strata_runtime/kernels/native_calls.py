"""Calls of the native library that take one block of packed numbers, and matrices as it reads them. Shared by the modules that wrap its functions."""

import ctypes
import itertools
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from strata_runtime.kernels.native import library


@cache
def function(name: str) -> Callable[[bytes], None]:
    """A function of the library, which is here: whoever calls has asked first."""
    called: Callable[[bytes], None] = _function(name, None)
    return called


@cache
def counting(name: str) -> Callable[[bytes], int]:
    """The same of one that answers with a number."""
    called: Callable[[bytes], int] = _function(name, ctypes.c_int64)
    return called


def _function(name: str, answers: type[ctypes.c_int64] | None) -> Any:
    found = library()
    assert found is not None, "there is no native library: whether it takes these tensors was not asked"
    named = getattr(found, name)
    named.argtypes, named.restype = (ctypes.c_char_p,), answers
    return named


class Changes:
    """Of the weights of this process: what was worked out from linears as they are holds for as long as `now` is what it was."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # no two threads get the same one
        self._last = 0

    def happened(self) -> None:
        """From the next step on a linear or norm has another weight, or another linear, norm or layer its place."""
        self._last = next(self._numbers)

    @property
    def now(self) -> tuple[int, int]:
        """Differs, too, once a hook was set on whatever module: it wants to see what goes in or comes out."""
        return self._last, RemovableHandle.next_id


CHANGES = Changes()


def lined_up(matrix: Tensor) -> Tensor:
    """Neighbours of a row are neighbours in memory: most views are so as they are."""
    return matrix if matrix.is_contiguous() or matrix.stride(1) == 1 else matrix.contiguous()


DENSE, PLANES, PLANES_INT8, CHANNELS, PLANES_DECODED = range(5)  # kinds of products: `Kind` of kernels/native/layer.cpp
_PRODUCT = struct.Struct("3q168s")
PRODUCT_BYTES = _PRODUCT.size


def product(kind: int, columns: int, bias: Tensor | None, weight: bytes) -> bytes:
    """A linear as a call for a whole layer names it: `Product` of layer.cpp.

    `weight`: what names it in a call of its own; `bias`: [rows], where that call takes none. The bytes hold neither.
    """
    return _PRODUCT.pack(kind, columns, 0 if bias is None else bias.data_ptr(), weight)
