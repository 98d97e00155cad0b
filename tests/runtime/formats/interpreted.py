"""The Triton kernels under Triton's interpreter, on the CPU: what machine instructions and bfloat16 mean there is said in numpy.

The interpreter knows no inline assembly and multiplies bfloat16 as integers. Import `products` from here and nowhere else in these tests: kernels
are bound to the interpreter when their module is first imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

__all__ = ["interpreter", "products"]

Words = NDArray[np.uint32]


def permute(low: Any, high: Any, selectors: Any) -> Any:
    """PTX `prmt` in its default mode, for selectors below 8 (the eighth bit would spread a sign)."""
    eight = _words(low).astype(np.uint64) | _words(high).astype(np.uint64) << np.uint64(32)
    chosen = _words(selectors)
    assert not np.any(chosen & 0x8888), "a selector of 8 or more"
    picked = np.zeros(np.broadcast_shapes(eight.shape, chosen.shape), np.uint32)
    for place in range(4):
        index = (chosen >> np.uint32(4 * place)) & np.uint32(7)
        byte = (eight >> (index * np.uint32(8)).astype(np.uint64)) & np.uint64(0xFF)
        picked |= byte.astype(np.uint32) << np.uint32(8 * place)
    return _tensor(picked)


def shifted_right(word: Any, power: Any) -> Any:
    """PTX `mul.hi.u32`."""
    product = _words(word).astype(np.uint64) * _words(power).astype(np.uint64)
    return _tensor((product >> np.uint64(32)).astype(np.uint32))


def add_products(values: Any, inputs: Any, sums: Any) -> Any:
    return tl.dot(values.to(tl.float32), inputs.to(tl.float32), sums)


def _words(value: Any) -> Words:
    return np.asarray(value.handle.data if isinstance(value, tl.tensor) else getattr(value, "value", value)).astype(
        np.uint32
    )


def _tensor(words: Words) -> Any:
    return tl.tensor(TensorHandle(words, tl.uint32), tl.block_type(tl.uint32, list(words.shape)))


@contextmanager
def interpreter() -> Iterator[None]:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield


with interpreter():
    tl.max, tl.sum = triton.jit(tl.max.fn), triton.jit(tl.sum.fn)  # were bound to the compiler when Triton was imported

    from strata_runtime.kernels import triton_bits

    triton_bits.permute, triton_bits.shifted_right, triton_bits.add_products = permute, shifted_right, add_products
    from strata_runtime.formats.planes import triton_products as products
    from strata_runtime.kernels import triton_kernels  # noqa: F401 -- binds them
