"""Codes of 2, 3, 4 or 8 bits in the machine words of a GPTQ checkpoint: a little-endian stream of bits along one side of a matrix.

Called by `tensors`, which reads and writes checkpoints. The width of the words does not matter, only their order: eight codes of b bits are b
bytes, so 3 bits are 32 codes in 12 bytes, of which two straddle a 32-bit word. Knows nothing of what a code means.
"""

import torch
from torch import Tensor

_CODES = 8  # so many codes fill whole bytes, whatever their bits
_BYTE = 8


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """words: integers [W, N], the stream runs down each column -> codes uint8 [count, N]."""
    flat = words.flatten().view(torch.uint8).view(words.shape[0], words.shape[1], -1)
    return _unpack(flat.permute(0, 2, 1).reshape(-1, words.shape[1]), bits, count)


def unpack_columns(words: Tensor, bits: int, count: int) -> Tensor:
    """words: integers [G, W], the stream runs along each row -> codes uint8 [count, G]."""
    return _unpack(words.flatten().view(torch.uint8).view(words.shape[0], -1).t(), bits, count)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """codes: uint8 [K, N] below 2^bits -> int32 [ceil(K * bits / 32), N], zeros after the last code."""
    packed = _pack(codes, bits).view(-1, 4, codes.shape[1]).permute(0, 2, 1)
    return packed.flatten().view(torch.int32).view(-1, codes.shape[1])


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """codes: uint8 [N, G] below 2^bits -> int32 [G, ceil(N * bits / 32)]."""
    return _pack(codes, bits).t().flatten().view(torch.int32).view(codes.shape[1], -1)


def packed_words(count: int, bits: int, word_bits: int = 32) -> int:
    """Words that `count` codes take."""
    return -(-count * bits // word_bits)


def _unpack(stream: Tensor, bits: int, count: int) -> Tensor:
    """stream: uint8 [bytes, M] -> uint8 [count, M]."""
    missing = -stream.shape[0] % bits
    whole = torch.nn.functional.pad(stream, (0, 0, 0, missing)) if missing else stream
    blocks = whole.reshape(-1, bits, stream.shape[1])
    codes = torch.empty(blocks.shape[0], _CODES, stream.shape[1], dtype=torch.uint8, device=stream.device)
    for place in range(_CODES):
        byte, shift = divmod(place * bits, _BYTE)
        code = blocks[:, byte] >> shift
        if shift + bits > _BYTE:
            code |= blocks[:, byte + 1] << (_BYTE - shift)
        codes[:, place] = code & ((1 << bits) - 1)
    return codes.view(-1, stream.shape[1])[:count]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """codes: uint8 [count, M] -> uint8 [bytes, M], a multiple of 4 bytes."""
    count, width = codes.shape
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -count % _CODES)).view(-1, _CODES, width)
    blocks = torch.zeros(padded.shape[0], bits, width, dtype=torch.uint8, device=codes.device)
    for place in range(_CODES):
        byte, shift = divmod(place * bits, _BYTE)
        blocks[:, byte] |= padded[:, place] << shift
        if shift + bits > _BYTE:
            blocks[:, byte + 1] |= padded[:, place] >> (_BYTE - shift)
    stream = blocks.view(-1, width)
    size = 4 * packed_words(count, bits)
    return torch.nn.functional.pad(stream, (0, 0, 0, max(0, size - stream.shape[0])))[:size]
