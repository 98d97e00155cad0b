"""Weight formats: how the weights of one linear operator are stored, byte for byte.

The planner counts with these and the runtime allocates by them, so that predicted and measured memory are the same
number. Knows nothing of kernels or devices.

| format   | bits | stored per linear of N outputs and K inputs                              | activations |
|----------|------|--------------------------------------------------------------------------|-------------|
| `dense`  | 16   | N*K in the compute type                                                  | 16 (or 32)  |
| `int8`   | 8    | N*K int8, a symmetric scale per output in the compute type               | 16 (or 32)  |
| `w8a8`   | 8    | N*K int8, a symmetric float32 scale per output                           | 8, dynamic  |
| `int4`   | 4    | N*K/2, an asymmetric scale and zero per group in the compute type        | 16 (or 32)  |
| `int3`   | 3    | N*K*3/8 (a plane of two bits, a plane of one), scale and zero as in int4 | 16 (or 32)  |
"""

from typing import Literal, get_args

FormatName = Literal["dense", "int8", "w8a8", "int4", "int3"]
ComputeType = Literal["bfloat16", "float16", "float32"]

FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
BITS_OF_FORMAT: dict[FormatName, int] = {"dense": 16, "int8": 8, "w8a8": 8, "int4": 4, "int3": 3}
DEFAULT_FORMAT_OF_BITS: dict[int, FormatName] = {16: "dense", 8: "int8", 4: "int4", 3: "int3"}
COMPUTE_TYPE_BYTES: dict[ComputeType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUP_SIZES = (128, 64, 32)  # what the int4 kernels of CPU and CUDA take, widest first


def group_size(in_features: int) -> int:
    """The widest supported group that divides a row of the weight; rows that none divides are padded to 32."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


def padded_in_features(in_features: int) -> int:
    size = group_size(in_features)
    return -(-in_features // size) * size


def stored_bytes(name: FormatName, out_features: int, in_features: int, compute_type: ComputeType) -> int:
    """Bytes of one weight matrix [out_features, in_features] with all its scales and zeros; the bias is apart."""
    item = COMPUTE_TYPE_BYTES[compute_type]
    if name == "dense":
        return out_features * in_features * item
    if name == "int8":
        return out_features * (in_features + item)
    if name == "w8a8":
        return out_features * (in_features + 4)
    columns = padded_in_features(in_features)
    scales_and_zeros = out_features * (columns // group_size(in_features)) * 2 * item
    return out_features * columns * BITS_OF_FORMAT[name] // 8 + scales_and_zeros
