"""Weight formats: how the weights of one linear operator are stored, byte for byte.

The planner counts with these and the runtime allocates by them, so that predicted and measured memory are the same
number. Knows nothing of kernels or devices.

| format             | bits | stored per linear of N outputs and K inputs                              | activations |
|--------------------|------|--------------------------------------------------------------------------|-------------|
| `dense`            | 16   | N*K in the compute type                                                  | 16 (or 32)  |
| `int8`             | 8    | N*K int8, a symmetric scale per output in the compute type               | 16 (or 32)  |
| `w8a8`             | 8    | N*K int8, a symmetric float32 scale per output                           | 8, dynamic  |
| `w8a8_static`      | 8    | as `w8a8`, a smoothing factor per input, one activation scale (float32)  | 8, static   |
| `fp8_e4m3`         | 8    | N*K float8, a float32 scale per output                                   | 16 (or 32)  |
| `fp8_a8`           | 8    | as `fp8_e4m3`                                                            | float8, dynamic |
| `fp8_block`        | 8    | N*K float8, a float32 scale per block of outputs and inputs (128 x 128)  | 16 (or 32)  |
| `int4`             | 4    | N*K/2, an asymmetric scale and zero per group in the compute type        | 16 (or 32)  |
| `int3`             | 3    | N*K*3/8 (a plane of two bits, a plane of one), scale and zero as in int4 | 16 (or 32)  |
| `any3` ... `any8`  | k    | k bit-planes of N*K/8, 2^k centroids per output in the compute type      | 16 (or 32)  |
| `any4_a8`          | 4    | as `any4`                                                                | 8, dynamic  |
| `gptq2` ... `gptq8`| k    | k bit-planes of N*K/8, a float16 scale and an 8-bit zero per group, int32 order of inputs if `ordered` | 16 (or 32) |

Bit-planes (`any*`, `gptq*`): K is padded to 64. `any*` follow Any-Precision LLM (arXiv 2402.10517): the k-bit model is the k most
significant planes of the 8-bit one. `gptq*` and `fp8_block` are what a checkpoint brings: no weight is made into them while it loads.
"""

from typing import Literal, get_args

FormatName = Literal[
    "dense",
    "int8",
    "w8a8",
    "w8a8_static",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e4m3_tensor",
    "fp8_e5m2_tensor",
    "fp8_a8",
    "fp8_block",
    "int4",
    "int3",
    "any3",
    "any4",
    "any5",
    "any6",
    "any7",
    "any8",
    "any4_a8",
    "gptq2",
    "gptq3",
    "gptq4",
    "gptq8",
]
ComputeType = Literal["bfloat16", "float16", "float32"]

# Measured profiles of 0.1.0 name them.
RETIRED: frozenset[FormatName] = frozenset({"fp8_e5m2", "fp8_e4m3_tensor", "fp8_e5m2_tensor"})
FORMAT_NAMES: tuple[FormatName, ...] = tuple(name for name in get_args(FormatName) if name not in RETIRED)
ANY_PRECISION: dict[int, FormatName] = {3: "any3", 4: "any4", 5: "any5", 6: "any6", 7: "any7", 8: "any8"}
GPTQ: dict[int, FormatName] = {2: "gptq2", 3: "gptq3", 4: "gptq4", 8: "gptq8"}
STORED_FORMATS: frozenset[FormatName] = frozenset({*GPTQ.values(), "fp8_block"})  # a checkpoint's own
# Made of a model's linears one by one, beside the checkpoint: experts that transformers fuses have none.
WITHOUT_EXPERTS: frozenset[FormatName] = frozenset({*ANY_PRECISION.values(), "any4_a8", "w8a8_static"})
BITS_OF_FORMAT: dict[FormatName, int] = {
    **dict.fromkeys(FORMAT_NAMES, 8),
    "dense": 16,
    "int4": 4,
    "int3": 3,
    "any4_a8": 4,
    **{name: bits for family in (ANY_PRECISION, GPTQ) for bits, name in family.items()},
}
DEFAULT_FORMAT_OF_BITS: dict[int, FormatName] = {16: "dense", 8: "int8", 4: "int4", 3: "int3"}
Method = Literal["roundToNearest", "anyPrecision", "float8"]
# How weights become fewer bits -> bits -> formats: first the one with 16-bit activations, then those that round activations too.
FORMATS_OF_METHOD: dict[Method, dict[int, tuple[FormatName, ...]]] = {
    "roundToNearest": {16: ("dense",), 8: ("int8", "w8a8", "fp8_a8"), 4: ("int4",), 3: ("int3",)},
    "anyPrecision": {
        16: ("dense",),
        **{bits: (name,) for bits, name in ANY_PRECISION.items()},
        8: ("any8", "w8a8", "fp8_a8"),
        4: ("any4", "any4_a8"),
    },
    "float8": {16: ("dense",), 8: ("fp8_e4m3", "fp8_a8")},
}
COMPUTE_TYPE_BYTES: dict[ComputeType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUP_SIZES = (128, 64, 32)  # what the int4 kernels of CPU and CUDA take, widest first
GPTQ_GROUP = 128
FLOAT8_BLOCK = (128, 128)
WHOLE_ROW_VALUES = 64  # that `w8a8` of some inputs alone has beside them, by which it rounds as whole rows are: kernels take inputs by so many
PLANE_QUANTUM = 64  # inputs: rows of bit-planes are whole words of 64 bits

_FLOAT32_BYTES = 4
_GPTQ_GROUP_BYTES = 3  # a float16 scale, a zero of 8 bits
_ORDER_BYTES = 4


def group_size(in_features: int) -> int:
    """The widest supported group that divides a row of the weight; rows that none divides are padded to 32."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), GROUP_SIZES[-1])


def padded_in_features(in_features: int) -> int:
    size = group_size(in_features)
    return -(-in_features // size) * size


def part_in_groups(in_features: int, first: int, last: int) -> tuple[int, int]:
    """Columns, with their padding, and group of the inputs first..last-1 of a row: narrower than the whole's where the part begins or ends within one.
    0: no group is narrow enough.
    """
    end = padded_in_features(in_features) if last == in_features else last
    sizes = (size for size in GROUP_SIZES if size <= group_size(in_features))
    return end - first, next((size for size in sizes if first % size == end % size == 0), 0)


def plane_columns(in_features: int) -> int:
    """Inputs of a bit-plane with their padding."""
    return -(-in_features // PLANE_QUANTUM) * PLANE_QUANTUM


def stored_bytes(
    name: FormatName,
    out_features: int,
    in_features: int,
    compute_type: ComputeType,
    *,
    group: int = GPTQ_GROUP,
    ordered: bool = False,
) -> int:
    """Bytes of one weight matrix [out_features, in_features] with all its scales, zeros and tables; the bias is apart.

    `group` (inputs that share a scale; at most in_features) and `ordered` (inputs were quantized in an order of their own: act-order)
    are a GPTQ checkpoint's and count for `gptq*` alone. `fp8_block` is counted with the usual block; of another, `block_float8_bytes`.
    """
    item, bits = COMPUTE_TYPE_BYTES[compute_type], BITS_OF_FORMAT[name]
    if name.startswith("any"):
        return out_features * (plane_columns(in_features) * bits // 8 + (1 << bits) * item)
    if name.startswith("gptq"):
        groups = -(-in_features // min(group, in_features))
        order = in_features * _ORDER_BYTES if ordered else 0
        return out_features * (plane_columns(in_features) * bits // 8 + groups * _GPTQ_GROUP_BYTES) + order
    if name == "fp8_block":
        return block_float8_bytes(out_features, in_features)
    if name in {"int4", "int3"}:
        return groups_bytes(name, out_features, padded_in_features(in_features), group_size(in_features), compute_type)
    metadata = {
        "dense": 0,
        "int8": out_features * item,
        "w8a8_static": out_features * _FLOAT32_BYTES + in_features * item + _FLOAT32_BYTES,
    }
    width = item if name == "dense" else 1
    return out_features * in_features * width + metadata.get(name, out_features * _FLOAT32_BYTES)


def groups_bytes(name: FormatName, out_features: int, columns: int, group: int, compute_type: ComputeType) -> int:
    """Of a weight matrix in `int4` or `int3`, whose `columns` are its inputs with their padding: codes, and a scale and a zero for each group."""
    scales_and_zeros = out_features * (columns // group) * 2 * COMPUTE_TYPE_BYTES[compute_type]
    return out_features * columns * BITS_OF_FORMAT[name] // 8 + scales_and_zeros


def block_float8_bytes(out_features: int, in_features: int, block: tuple[int, int] = FLOAT8_BLOCK) -> int:
    """Of a weight matrix in `fp8_block`, a scale for each `block` of outputs and inputs."""
    blocks = -(-out_features // block[0]) * -(-in_features // block[1])
    return out_features * in_features + blocks * _FLOAT32_BYTES
