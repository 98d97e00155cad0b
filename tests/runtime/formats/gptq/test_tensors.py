"""Laws of reading GPTQ checkpoints: every variant gives the weights that its packer put in, and damage is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.quantization import ModuleQuantization, Zeros
from strata_runtime.formats import PrecisionError
from strata_runtime.formats.gptq import GptqTensors, decode, encode
from tests.laws import share, swept
from tests.runtime.formats.gptq import reference

torch.set_num_threads(1)

CONVENTIONS: tuple[Zeros, ...] = ("less one", "less one in words", "plain")
GROUPINGS = ("runs", "act-order", "whole row")


def a_checkpoint(
    bits: int,
    convention: Zeros,
    grouping: str,
    *,
    shape: tuple[int, int] = (32, 96),
    group: int = 32,
    symmetric: bool = False,
    scale_type: torch.dtype = torch.float16,
    word_bits: int = 32,
    seed: int = 0,
) -> tuple[reference.Checkpoint, ModuleQuantization]:
    draw = np.random.default_rng(seed)
    out_features, in_features = shape
    size = in_features if grouping == "whole row" else group
    count = -(-in_features // size)
    groups = np.arange(in_features) // size
    if grouping == "act-order":
        groups = draw.permutation(groups)
    zeros = (
        np.full((out_features, count), 1 << (bits - 1))
        if symmetric
        else draw.integers(0, 1 << bits, (out_features, count))
    )
    checkpoint = reference.pack(
        draw.integers(0, 1 << bits, (out_features, in_features)),
        zeros,
        torch.tensor(draw.uniform(1e-3, 0.1, (out_features, count))).to(scale_type),
        groups,
        bits=bits,
        convention=convention,
        word_bits=word_bits,
    )
    how = ModuleQuantization(bits, None if grouping == "whole row" else group, grouping == "act-order", symmetric)
    return checkpoint, how


def read(checkpoint: reference.Checkpoint, how: ModuleQuantization, zeros: Zeros, **changed: Any) -> Any:
    parts = {name: part for name, part in (checkpoint.parts | changed).items() if part is not None}
    return decode("layer.q_proj", GptqTensors.of("layer.q_proj", parts), how, zeros, checkpoint.codes.shape)


@pytest.mark.parametrize("bits", swept([2, 3, 4, 8], [3, 4]))
@pytest.mark.parametrize("convention", swept(CONVENTIONS, [*CONVENTIONS][:1]))
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_every_variant_is_read_bit_for_bit(bits: int, convention: Zeros, grouping: str, kind: str) -> None:
    checkpoint, how = a_checkpoint(bits, convention, grouping, symmetric=kind == "symmetric")
    codes = read(checkpoint, how, convention)
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        assert torch.equal(codes.dequantized(dtype), checkpoint.weight(dtype))
    assert codes.zeros.tolist() == checkpoint.zeros.tolist()


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    convention=st.sampled_from(CONVENTIONS),
    grouping=st.sampled_from(GROUPINGS),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group=st.integers(1, 80),
    seed=st.integers(0, 9),
)
@settings(max_examples=share(60), deadline=None)
def test_any_shape_is_read_and_written_back_as_it_was(
    bits: int, convention: Zeros, grouping: str, shape: tuple[int, int], group: int, seed: int
) -> None:
    checkpoint, how = a_checkpoint(bits, convention, grouping, shape=shape, group=group, seed=seed)
    codes = read(checkpoint, how, convention)
    assert torch.equal(codes.dequantized(), checkpoint.weight(torch.float32))
    written = encode(codes, convention).named("layer.q_proj")
    for part, tensor in checkpoint.parts.items():
        assert torch.equal(written[f"layer.q_proj.{part}"], tensor), part


@pytest.mark.parametrize("word_bits", [8, 16, 64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_words_of_other_widths_hold_the_same_stream(word_bits: int, bits: int, convention: Zeros) -> None:
    checkpoint, how = a_checkpoint(bits, convention, "act-order", word_bits=word_bits)
    assert torch.equal(read(checkpoint, how, convention).dequantized(), checkpoint.weight(torch.float32))


@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float32])
def test_scales_of_other_types_are_taken_as_they_are(scale_type: torch.dtype) -> None:
    checkpoint, how = a_checkpoint(4, "less one", "runs", scale_type=scale_type)
    assert torch.equal(read(checkpoint, how, "less one").dequantized(), checkpoint.weight(torch.float32))


def test_groups_are_runs_where_no_g_idx_is_there() -> None:
    checkpoint, how = a_checkpoint(4, "less one", "runs", shape=(8, 80))
    assert torch.equal(read(checkpoint, how, "less one", g_idx=None).dequantized(), checkpoint.weight(torch.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_zeros_stored_plainly_under_the_old_name_are_recognised(bits: int) -> None:
    checkpoint, how = a_checkpoint(bits, "plain", "runs", symmetric=True)
    assert torch.equal(read(checkpoint, how, "less one").dequantized(), checkpoint.weight(torch.float32))


def _with(part: str, change: Any) -> dict[str, Any]:
    checkpoint, _ = a_checkpoint(4, "less one", "act-order")
    return {part: change(checkpoint.parts[part].clone())}


def _fill(tensor: torch.Tensor, place: Any, value: float) -> torch.Tensor:
    tensor[place] = value
    return tensor


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"scales": None}, r"layer.q_proj: the checkpoint has no scales"),
    "no qweight and qzeros": ({"qweight": None, "qzeros": None}, "has no qweight and no qzeros"),
    "no order": ({"g_idx": None}, "no g_idx is there"),
    "short qweight": (
        _with("qweight", lambda each: each[:-1]),
        r"qweight: shape \[11, 32\]; 96 inputs .* need \[12, 32\]",
    ),
    "narrow qzeros": (_with("qzeros", lambda each: each[:, :-1]), r"qzeros: shape \[3, 3\]"),
    "transposed scales": (_with("scales", lambda each: each.t()), r"scales: shape \[32, 3\]"),
    "short g_idx": (_with("g_idx", lambda each: each[1:]), r"g_idx: shape \[95\]"),
    "float qweight": (_with("qweight", lambda each: each.float()), "qweight: type torch.float32"),
    "integer scales": (_with("scales", lambda each: each.int()), "scales: type torch.int32"),
    "group too large": (
        _with("g_idx", lambda each: _fill(each, 5, 3)),
        "g_idx: groups from 0 to 3, and .* groups 0 to 2",
    ),
    "group negative": (_with("g_idx", lambda each: _fill(each, 5, -1)), "g_idx: groups from -1 to 2"),
    "scale not finite": (_with("scales", lambda each: _fill(each, (1, 4), float("nan"))), "scales: 1 of 96 are NaN"),
    "a hole in the scales": (_with("scales", lambda each: _fill(each, 1, 0.0)), "all scales of group 1 are zero"),
}


@pytest.mark.parametrize(("changed", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_refused_with_the_tensors_name(changed: dict[str, Any], message: str) -> None:
    checkpoint, how = a_checkpoint(4, "less one", "act-order")
    with pytest.raises(PrecisionError, match=message):
        read(checkpoint, how, "less one", **changed)


def test_three_bits_in_other_words_than_32_are_refused() -> None:
    checkpoint, how = a_checkpoint(3, "plain", "runs")
    words = checkpoint.parts["qweight"].view(torch.int16)
    with pytest.raises(PrecisionError, match=r"q_proj.qweight: 3 bits are read from words of int32"):
        read(checkpoint, how, "plain", qweight=words)
