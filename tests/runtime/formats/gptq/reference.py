"""An independent reader and packer of GPTQ checkpoints for the laws: bit by bit, one value at a time, by the format's description alone.

Numbers are Python integers; nothing here is shared with the code under test.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Checkpoint:
    """The parts of one linear as tensors, and what they were made of: codes [N, K], zeros [N, G], scales [N, G], groups [K]."""

    parts: dict[str, torch.Tensor]
    codes: Ints
    zeros: Ints
    scales: torch.Tensor
    groups: Ints

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] = scale * (code - zero), each product rounded once to `dtype`."""
        rows = [
            [
                float(self.scales[n, self.groups[k]].double()) * int(self.codes[n, k] - self.zeros[n, self.groups[k]])
                for k in range(self.codes.shape[1])
            ]
            for n in range(self.codes.shape[0])
        ]
        return torch.tensor(rows, dtype=torch.float64).to(dtype)


def pack_stream(values: list[int], bits: int, word_bits: int) -> list[int]:
    """A little-endian stream: value i takes bits i * bits and following of one long number, which is cut into words."""
    number = sum(value << (place * bits) for place, value in enumerate(values))
    words = -(-len(values) * bits // word_bits)
    return [(number >> (word * word_bits)) & ((1 << word_bits) - 1) for word in range(words)]


def signed(word: int, word_bits: int) -> int:
    return word - (1 << word_bits) if word >> (word_bits - 1) else word


def stored_zeros(zeros: list[int], bits: int, convention: str, word_bits: int) -> list[int]:
    """The words of one row of qzeros."""
    if convention == "plain":
        return pack_stream(zeros, bits, word_bits)
    if convention == "less one in words" and bits != 3:
        ones = sum(1 << place for place in range(0, word_bits, bits))
        return [(word - ones) % (1 << word_bits) for word in pack_stream(zeros, bits, word_bits)]
    return pack_stream([(zero - 1) % (1 << bits) for zero in zeros], bits, word_bits)


def pack(
    codes: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, *, bits: int, convention: str, word_bits: int = 32
) -> Checkpoint:
    """scales: [N, G] in the type that the checkpoint has."""
    kind = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[word_bits]
    columns = [pack_stream([int(code) for code in row], bits, word_bits) for row in codes]
    rows = [stored_zeros([int(zero) for zero in column], bits, convention, word_bits) for column in zeros.T]
    parts = {
        "qweight": torch.tensor([[signed(word, word_bits) for word in row] for row in columns], dtype=kind)
        .t()
        .contiguous(),
        "qzeros": torch.tensor([[signed(word, word_bits) for word in row] for row in rows], dtype=kind),
        "scales": scales.t().contiguous(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return Checkpoint(parts, codes, zeros, scales, groups)
