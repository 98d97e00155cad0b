"""The four tensors of one linear in a GPTQ checkpoint, checked and turned into codes, and back.

Called by the loader for every quantized linear and by `writer`. The format of auto-gptq and GPTQModel, of K inputs, N outputs, G groups:

| tensor    | type    | shape                    | holds                                                        |
|-----------|---------|--------------------------|--------------------------------------------------------------|
| `qweight` | int32   | [ceil(K * bits / 32), N] | codes, a stream of bits down each column                     |
| `qzeros`  | int32   | [G, ceil(N * bits / 32)] | zeros, a stream of bits along each row; `gptq`: less one     |
| `scales`  | float16 | [G, N]                   | bfloat16 and float32 occur too                               |
| `g_idx`   | int32   | [K]                      | group of each input; may be absent where groups are runs     |

Words of 8, 16 and 64 bits (`pack_dtype`) hold the same stream. Sources: auto-gptq 0.8, GPTQModel 7 (`pack`, `dequantize_weight`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_planner.contract.quantization import ModuleQuantization, Zeros
from strata_runtime.formats.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.gptq import bitstream
from strata_runtime.formats.gptq.codes import GptqCodes, group_of_inputs

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_NEEDED = PARTS[:3]
_WORDS = (torch.int32, torch.int64, torch.int16, torch.int8)
_WHOLE_IN_WORDS = (2, 4, 8)  # fields of 3 bits straddle words and are always counted one by one
_AGAIN = "the checkpoint is damaged or its quantization_config is not its own; fetch it again"


@dataclass(frozen=True)
class GptqTensors:
    """As they lie in the checkpoint. g_idx None: absent."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None

    @classmethod
    def of(cls, name: str, found: Mapping[str, Tensor]) -> "GptqTensors":
        """`found`: part -> tensor. Raises PrecisionError where one is missing."""
        missing = [part for part in _NEEDED if part not in found]
        if missing:
            raise PrecisionError(
                f"{name}: the checkpoint has no {' and no '.join(missing)} beside its other parts; {_AGAIN}"
            )
        return cls(found["qweight"], found["qzeros"], found["scales"], found.get("g_idx"))

    def shape(self, bits: int) -> tuple[int, int]:
        """[N, K] by the tensors alone."""
        if self.g_idx is not None:
            return self.qweight.shape[1], self.g_idx.shape[0]
        return self.qweight.shape[1], self.qweight.shape[0] * 8 * self.qweight.element_size() // bits

    def named(self, name: str) -> dict[str, Tensor]:
        """Checkpoint key -> tensor, of the linear `name`."""
        parts = zip(PARTS, (self.qweight, self.qzeros, self.scales, self.g_idx), strict=True)
        return {f"{name}.{part}": tensor for part, tensor in parts if tensor is not None}


def decode(
    name: str, stored: GptqTensors, how: ModuleQuantization, zeros: Zeros, shape: tuple[int, int] | None = None
) -> GptqCodes:
    """Codes of the linear `name`. Raises PrecisionError (value, rule, fix) for what is not of the format.

    `shape`: [N, K] as the model has it; without it, what the tensors themselves say.
    """
    shape = shape or stored.shape(how.bits)
    out_features, in_features = shape
    groups = -(-in_features // (how.group or in_features))
    _check_shapes(name, stored, how.bits, shape, groups)
    _check_scales(name, stored.scales)
    return GptqCodes(
        bits=how.bits,
        codes=bitstream.unpack_rows(stored.qweight, how.bits, in_features).t().contiguous(),
        scales=stored.scales.t().contiguous(),
        zeros=_decode_zeros(stored.qzeros, how, zeros, out_features),
        groups=_groups(name, stored, how, in_features),
    )


def encode(codes: GptqCodes, zeros: Zeros) -> GptqTensors:
    """What `decode` reads. scales become float16."""
    plain = bitstream.pack_columns(codes.zeros, codes.bits)
    if zeros == "less one in words" and codes.bits in _WHOLE_IN_WORDS:
        stored = plain - _ones(codes.bits, plain)
    elif zeros == "plain":
        stored = plain
    else:
        stored = bitstream.pack_columns((codes.zeros - 1) & ((1 << codes.bits) - 1), codes.bits)
    return GptqTensors(
        qweight=bitstream.pack_rows(codes.codes.t().contiguous(), codes.bits),
        qzeros=stored,
        scales=codes.scales.t().to(torch.float16).contiguous(),
        g_idx=codes.groups.to(torch.int32),
    )


def _decode_zeros(qzeros: Tensor, how: ModuleQuantization, zeros: Zeros, out_features: int) -> Tensor:
    """uint8 [N, G].

    A checkpoint that says `gptq` and `sym` and holds 2^(bits - 1) everywhere is `gptq_v2` by another name: symmetric zeros are that number
    (such checkpoints are out there, vllm#38966), and read otherwise every weight would be one step off.
    """
    bits = how.bits
    fields = bitstream.unpack_columns(qzeros, bits, out_features)
    if zeros == "plain" or (how.symmetric and bool((fields == 1 << (bits - 1)).all())):
        return fields.contiguous()
    if zeros == "less one in words" and bits in _WHOLE_IN_WORDS:
        return bitstream.unpack_columns(qzeros + _ones(bits, qzeros), bits, out_features).contiguous()
    return ((fields + 1) & ((1 << bits) - 1)).contiguous()


def _ones(bits: int, words: Tensor) -> int:
    """A one in each field of a word."""
    return sum(1 << place for place in range(0, 8 * words.element_size(), bits))


def _groups(name: str, stored: GptqTensors, how: ModuleQuantization, in_features: int) -> Tensor:
    if stored.g_idx is None:
        if how.ordered:
            raise PrecisionError(
                f"{name}: desc_act says that inputs have an order of their own, and no g_idx is there; {_AGAIN}"
            )
        return group_of_inputs(in_features, how.group or in_features, device=stored.qweight.device)
    groups = stored.g_idx.to(torch.int32)
    low, high = (int(each) for each in groups.aminmax())
    count = stored.scales.shape[0]
    if low < 0 or high >= count:
        raise PrecisionError(
            f"{name}.g_idx: groups from {low} to {high}, and there are scales for groups 0 to {count - 1}; {_AGAIN}"
        )
    return groups


def _check_shapes(name: str, stored: GptqTensors, bits: int, shape: tuple[int, int], groups: int) -> None:
    out_features, in_features = shape
    for part in ("qweight", "qzeros"):
        words: Tensor = getattr(stored, part)
        if words.dtype not in _WORDS:
            raise PrecisionError(
                f"{name}.{part}: type {words.dtype}; packed codes are integers of 8 to 64 bits; {_AGAIN}"
            )
        if bits == 3 and words.dtype != torch.int32:
            raise PrecisionError(f"{name}.{part}: 3 bits are read from words of int32, and these are {words.dtype}")
    word_bits = 8 * stored.qweight.element_size()
    expected = {
        "qweight": (bitstream.packed_words(in_features, bits, word_bits), out_features),
        "qzeros": (groups, bitstream.packed_words(out_features, bits, 8 * stored.qzeros.element_size())),
        "scales": (groups, out_features),
        "g_idx": (in_features,),
    }
    for part, wanted in expected.items():
        tensor: Tensor | None = getattr(stored, part)
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise PrecisionError(
                f"{name}.{part}: shape {list(tensor.shape)}; {in_features} inputs and {out_features} outputs of {bits} bits in "
                f"{groups} groups need {list(wanted)}; {_AGAIN}"
            )


def _check_scales(name: str, scales: Tensor) -> None:
    if not scales.is_floating_point():
        raise PrecisionError(f"{name}.scales: type {scales.dtype}; a floating type is needed; {_AGAIN}")
    broken = int((~torch.isfinite(scales)).sum())
    if broken:
        raise WeightNotFiniteError(f"{name}.scales: {broken} of {scales.numel()} are NaN or infinite; {_AGAIN}")
    empty = (scales == 0).all(dim=1).nonzero().flatten().tolist()
    if empty:
        raise PrecisionError(
            f"{name}.scales: all scales of group {empty[0]} are zero ({len(empty)} groups of {scales.shape[0]}), so its weights would "
            f"all be; {_AGAIN}"
        )
