"""Products on an NVIDIA GPU with weights stored as bit-planes. Listed in `kernels` and `gptq.kernels`; launches `triton_kernels`.

Up to 16 tokens a kernel multiplies straight from the planes; beyond, rows are decoded to the compute type, as many at a time as bounded
memory allows, and multiplied by the vendor's library. Importing this module does not import Triton: machines without it take the
pure-torch product. Knows launches; what they compute is in `triton_kernels`.
"""

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.pieces import multiply_in_pieces
from strata_runtime.formats.planes.planes import TILE_COLUMNS
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels.triton_device import current, is_usable

MOST_TOKENS = 16
ROWS = 32  # of the weight in one program: two fragments of 16 rows of the tensor cores
SELECTED_BITS = 6  # up to here a row's table fits in registers
# At a time, by bits: what registers and shared memory allow.
PROGRAMS_ON_MULTIPROCESSOR = {2: 7, 3: 7, 4: 6, 5: 5, 6: 4, 7: 4, 8: 4}
WEIGHTS_AT_A_TIME = 1 << 26  # decoded: 128 MiB beside the weight itself
OPTIONS = {"enable_fp_fusion": False}  # roundings are the reference's; left out, Triton warns
_WORD_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one weight gives its kernels: `triton_kernels` says what `values` must hold."""

    product: Any
    decode: Any
    planes: tuple[Tensor, ...]
    values: tuple[Any, ...]
    constants: dict[str, int]


def product_runs(tokens: Tensor, weight: PlanesWeight | GptqWeight) -> bool:
    """Whether the kernels take these: a GPU with Triton, activations of 16 bits, and a table of the same type."""
    if not tokens.is_cuda or tokens.dtype not in {torch.float16, torch.bfloat16} or not is_usable(tokens.device):
        return False
    return isinstance(weight, GptqWeight) or weight.table.dtype == tokens.dtype


def product(tokens: Tensor, weight: PlanesWeight | GptqWeight) -> Tensor:
    """tokens [M, K] in the order of the planes, M at most MOST_TOKENS -> [M, N]. The sums of a token do not depend on how many come with it."""
    count, out_features = tokens.shape[0], weight.out_features
    inputs = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    launch = launch_of(weight)
    words = launch.planes[0].shape[1]
    tiles = -(-words * _WORD_BYTES * 8 // TILE_COLUMNS)
    at_a_time = PROGRAMS_ON_MULTIPROCESSOR[weight.bits] * _multiprocessors(tokens.device)
    share = tiles_of_share(-(-out_features // ROWS), tiles, at_a_time)
    shares = -(-tiles // share)
    sums = tokens.new_empty(shares, count, out_features, dtype=tokens.dtype if shares == 1 else torch.float32)
    with current(tokens.device):
        launch.product[-(-out_features // ROWS), shares](
            inputs,
            inputs.stride(0),
            launch.planes,
            launch.planes[0].stride(0),
            words,
            *launch.values,
            sums,
            (count, out_features, weight.in_features),
            share,
            TOKENS=8 if count <= 8 else 16,
            FULL=weight.in_features % TILE_COLUMNS == 0,
            **launch.constants,
        )
        return sums[0] if shares == 1 else _added(sums, tokens.dtype)


def dequantized(tokens: Tensor, weight: PlanesWeight | GptqWeight) -> Tensor:
    """tokens [M, K] in the order of the planes -> [M, N]: rows decoded to the compute type, then a dense product."""

    def rows(start: int, stop: int) -> Tensor:
        return decoded(rows_of(weight, start, stop), tokens.dtype)

    return multiply_in_pieces(tokens, (weight.out_features, weight.in_features), WEIGHTS_AT_A_TIME, rows)


def decoded(weight: PlanesWeight | GptqWeight, dtype: torch.dtype) -> Tensor:
    """The values [N, K] in dtype, the table's own for a PlanesWeight; inputs in the order of the planes."""
    launch = launch_of(weight)
    words = launch.planes[0].shape[1]
    shape = (weight.out_features, weight.in_features)
    out = launch.planes[0].new_empty(shape, dtype=dtype)
    grid = (-(-weight.out_features // ROWS), -(-words * _WORD_BYTES * 8 // TILE_COLUMNS))
    with current(out.device):
        constants = {name: value for name, value in launch.constants.items() if name != "num_stages"}
        launch.decode[grid](
            launch.planes, launch.planes[0].stride(0), words, *launch.values, out, shape, **constants
        )  # fmt: skip
    return out


def launch_of(weight: PlanesWeight | GptqWeight) -> Launch:
    kernels: Any = _kernels()
    planes = tuple(_words(plane) for plane in weight.planes)
    if len({plane.stride(0) for plane in planes}) > 1:
        planes = tuple(plane.contiguous() for plane in planes)
    shape = {"BITS": weight.bits, "ROWS": ROWS, **OPTIONS}
    if isinstance(weight, GptqWeight):
        groups = (weight.scales.shape[1], weight.group)
        values = (weight.scales.contiguous(), weight.zeros.contiguous(), groups)
        several = not _stripes_have_one_group(planes[0].shape[1], weight.group)
        constants = {**shape, "SPLIT_GROUPS": several, "num_warps": 2, "num_stages": 3}
        return Launch(kernels.group_product, kernels.group_decode, planes, values, constants)
    if weight.bits <= SELECTED_BITS:
        constants = {**shape, "num_warps": 2, "num_stages": 3}
        return Launch(
            kernels.selected_product, kernels.selected_decode, planes, (_words(weight.table.contiguous()),), constants
        )
    constants = {**shape, "num_warps": 2, "num_stages": 2}
    return Launch(kernels.gathered_product, kernels.gathered_decode, planes, (weight.table.contiguous(),), constants)


def rows_of(weight: PlanesWeight | GptqWeight, start: int, stop: int) -> PlanesWeight | GptqWeight:
    planes = tuple(plane[start:stop] for plane in weight.planes)
    if isinstance(weight, GptqWeight):
        scales, zeros = weight.scales[start:stop], weight.zeros[start:stop]
        return dataclasses.replace(weight, planes=planes, scales=scales, zeros=zeros)
    return dataclasses.replace(weight, planes=planes, table=weight.table[start:stop])


def tiles_of_share(row_blocks: int, tiles: int, programs_at_a_time: int) -> int:
    """Tiles that one program walks over: as few as leave all programs at work at the same time."""
    return -(-tiles // max(1, programs_at_a_time // row_blocks))


def _added(sums: Tensor, dtype: torch.dtype) -> Tensor:
    shares, count, out_features = sums.shape
    out = sums.new_empty(count, out_features, dtype=dtype)
    block, size = 1024, count * out_features
    _kernels().add_shares[(-(-size // block),)](sums, out, size, SHARES=shares, BLOCK=block, **OPTIONS)
    return out


def _words(matrix: Tensor) -> Tensor:
    """Rows as int32 words: a view, or a copy where rows do not start at whole words."""
    in_word = _WORD_BYTES // matrix.element_size()
    aligned = matrix.data_ptr() % _WORD_BYTES == 0 and matrix.storage_offset() % in_word == 0
    if not aligned or matrix.stride(1) != 1 or matrix.stride(0) % in_word:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int32)


@cache
def _stripes_have_one_group(words: int, group: int) -> bool:
    """Whether every run of columns that shares a bit of its bytes lies in one group."""
    columns = words * _WORD_BYTES * 8
    last = columns % TILE_COLUMNS or TILE_COLUMNS
    stripes = [
        *((start, TILE_COLUMNS // 8) for start in range(0, columns - last, TILE_COLUMNS // 8)),
        *((start, last // 8) for start in range(columns - last, columns, last // 8)),
    ]
    return all(start // group == (start + width - 1) // group for start, width in stripes)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter, which runs programs one by one
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _kernels() -> Any:
    from strata_runtime.kernels import triton_kernels  # noqa: PLC0415 -- Triton is not on every machine

    return triton_kernels
