"""Products with bit-planes in the native library, as operators of torch: `strata::planes_linear`, `::planes_linear_int8`, `::planes_group_linear`.

Called by `plane_kernels` and by the kernels of GPTQ, if `available()`. Checks what the library, which sees addresses and sizes alone, takes on trust.
Knows nothing of formats; which processor path runs is the library's choice. Operators have a fake form, so that torch can trace them.

Planes: uint8 [N, columns / 8], the most significant first (see `planes`); only neighbouring bytes of a row must be neighbours in memory, so rows and
tile-aligned columns of larger planes will do. Tokens [M, K] of any floating type, K of the columns real, result [M, N] of that type.
"""

import copy
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from strata_planner.contract.formats import plane_columns
from strata_runtime.kernels.native import library
from strata_runtime.kernels.native_calls import function, lined_up

TYPE_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST_INPUTS_INT8 = 1 << 16  # int32 holds the sum of so many products of bytes

_MOST_BITS = 8
# `PlanesCall` of kernels/native/calls.h: the tokens and the result, then the weight; `GroupsCall` has the groups behind them.
_TOKENS = struct.Struct("8q")
_WEIGHT = struct.Struct("21q")
_GROUPS = struct.Struct("6q")
_NOTHING = (0,) * _MOST_BITS


@cache
def available() -> bool:
    """Whether there is a library here; without one callers take the reference."""
    return library() is not None


def takes(tokens: Tensor, planes: Sequence[Tensor]) -> bool:
    """Whether the library can multiply these: on a processor, of types and bits that it knows."""
    return (
        tokens.device.type == "cpu"
        and tokens.dtype in TYPE_NUMBERS
        and 1 <= len(planes) <= _MOST_BITS
        and planes[0].device.type == "cpu"
        and available()
    )


@dataclass(frozen=True, eq=False)
class Stored:
    """Planes and a table as a call names them; holds what it names. Worked out once for a weight: microseconds count."""

    planes: Sequence[Tensor]
    table: Tensor | None
    numbers: bytes

    @classmethod
    def of(cls, planes: Sequence[Tensor], table: Tensor | None) -> "Stored":
        """Raises ValueError for planes that are not of one shape, or another's table."""
        table = None if table is None else lined_up(table)
        kept, numbers = _weight_numbers(planes, table)
        return cls(kept, table, _WEIGHT.pack(*numbers))

    def __deepcopy__(self, memo: dict[int, object]) -> "Stored":
        """Of planes of its own."""
        planes, table = copy.deepcopy((self.planes, self.table), memo)
        return Stored.of(planes, table)


def planes_linear(tokens: Tensor, planes: Sequence[Tensor], table: Tensor) -> Tensor:
    """The value of a weight is the entry of its row of `table` [N, 2^bits], of the tokens' type, that its code names."""
    return stored_linear(tokens, Stored.of(planes, table))


def planes_linear_int8(tokens: Tensor, planes: Sequence[Tensor], table: Tensor) -> Tensor:
    """As `planes_linear` with tokens rounded to int8 (a scale per token) and values to int8 (a scale per row); exact sums."""
    return stored_linear_int8(tokens, Stored.of(planes, table))


def stored_linear(tokens: Tensor, stored: Stored) -> Tensor:
    """As `planes_linear`."""
    return _multiply("strata_planes_linear", tokens, stored)


def decoded_linear(tokens: Tensor, stored: Stored) -> Tensor:
    """As `planes_linear` of bfloat16 where the library `native_dense.multiplies` it, for many tokens; sums are those of the dense product."""
    return _multiply("strata_planes_decoded_linear", tokens, stored)


def stored_linear_int8(tokens: Tensor, stored: Stored) -> Tensor:
    """As `planes_linear_int8`."""
    if tokens.shape[1] > MOST_INPUTS_INT8:
        raise ValueError(
            f"{tokens.shape[1]} inputs: sums of more than {MOST_INPUTS_INT8} do not fit int32; use the reference"
        )
    return _multiply("strata_planes_linear_int8", tokens, stored)


def planes_group_linear(tokens: Tensor, planes: Sequence[Tensor], scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Uniform groups of `group` inputs: value = (code - zero) * scale. scales: float16 [N, G], zeros: uint8 [N, G]."""
    rows, count = planes[0].shape[0], -(-tokens.shape[1] // group)
    if scales.dtype != torch.float16 or zeros.dtype != torch.uint8 or not scales.shape == zeros.shape == (rows, count):
        raise ValueError(
            f"scales {scales.dtype} {list(scales.shape)} and zeros {zeros.dtype} {list(zeros.shape)} must be float16 and uint8 [{rows}, {count}]"
        )
    tokens, scales, zeros = lined_up(tokens), lined_up(scales), lined_up(zeros)
    stored = Stored.of(planes, None)
    out = tokens.new_empty(tokens.shape[0], rows)
    groups = _GROUPS.pack(scales.data_ptr(), scales.stride(0), zeros.data_ptr(), zeros.stride(0), count, group)
    function("strata_planes_group_linear")(_token_numbers(tokens, stored, out) + stored.numbers + groups)
    return out


def decoded(planes: Sequence[Tensor], table: Tensor, in_features: int) -> Tensor:
    """The weight itself, [N, K] in the table's type."""
    stored = Stored.of(planes, table)
    out = table.new_empty(table.shape[0], stored.planes[0].shape[1] * 8)
    function("strata_planes_decode")(_token_numbers(out, stored, out) + stored.numbers)
    return out[:, :in_features]


def _multiply(name: str, tokens: Tensor, stored: Stored) -> Tensor:
    table = stored.table
    assert table is not None
    if table.dtype != tokens.dtype:
        raise ValueError(f"tokens {tokens.dtype} and table {table.dtype} must be of one type")
    tokens = lined_up(tokens)
    out = tokens.new_empty(tokens.shape[0], table.shape[0])
    function(name)(_token_numbers(tokens, stored, out) + stored.numbers)
    return out


def _token_numbers(tokens: Tensor, stored: Stored, out: Tensor) -> bytes:
    """The first part of `PlanesCall`."""
    count, in_features = tokens.shape
    columns = stored.planes[0].shape[1] * 8
    if plane_columns(in_features) != columns:
        raise ValueError(f"tokens {list(tokens.shape)} do not fit planes of {columns} columns")
    return _TOKENS.pack(
        tokens.data_ptr(),
        count,
        in_features,
        tokens.stride(0),
        TYPE_NUMBERS[tokens.dtype],
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


def _weight_numbers(planes: Sequence[Tensor], table: Tensor | None) -> tuple[Sequence[Tensor], tuple[int, ...]]:
    """The planes as they can be read, and the rest of `PlanesCall`."""
    shape, bits = planes[0].shape, len(planes)
    kept, addresses, strides = [], [], []
    for given in planes:
        plane = lined_up(given)
        if plane.dtype is not torch.uint8 or plane.shape != shape:
            raise ValueError(f"planes {[(each.dtype, list(each.shape)) for each in planes]} must be uint8 of one shape")
        kept.append(plane)
        addresses.append(plane.data_ptr())
        strides.append(plane.stride()[0])
    rows, row_bytes = shape
    if table is None:
        return kept, (rows, row_bytes * 8, bits, 0, 0, *addresses, *_NOTHING[bits:], *strides, *_NOTHING[bits:])
    if table.shape != (rows, 1 << bits):
        raise ValueError(f"table {list(table.shape)} is not one of {rows} rows and {bits} bits")
    at = (table.data_ptr(), table.stride()[0])
    return kept, (rows, row_bytes * 8, bits, *at, *addresses, *_NOTHING[bits:], *strides, *_NOTHING[bits:])


def _result(tokens: Tensor, planes: Sequence[Tensor], *_rest: object) -> Tensor:
    return tokens.new_empty(tokens.shape[0], planes[0].shape[0])


_operators = torch.library.Library("strata", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run in (
    ("planes_linear(Tensor tokens, Tensor[] planes, Tensor table) -> Tensor", planes_linear),
    ("planes_linear_int8(Tensor tokens, Tensor[] planes, Tensor table) -> Tensor", planes_linear_int8),
    (
        "planes_group_linear(Tensor tokens, Tensor[] planes, Tensor scales, Tensor zeros, int group) -> Tensor",
        planes_group_linear,
    ),
):
    _operators.define(_schema)  # type: ignore[no-untyped-call]
    _operators.impl(_schema.partition("(")[0], _run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"strata::{_schema.partition('(')[0]}", _result, lib=_operators)
