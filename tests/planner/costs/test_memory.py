"""Bytes counted by hand."""

import msgspec
import pytest

from strata_planner.contract.formats import ComputeType, FormatName, stored_bytes
from strata_planner.contract.plan import Speculation, SpeculationMode
from strata_planner.costs.memory import (
    embedding_bytes,
    kv_bytes_per_token,
    layer_weights_bytes,
)
from strata_planner.question.model import Model
from tests.planner.builders import a_model

# One layer of the builder's Llama: q 128x128, k and v 64x128, o 128x128, gate and up 384x128, down 128x384.
WEIGHTS = 128 * 128 * 2 + 64 * 128 * 2 + 384 * 128 * 3
OUTPUTS = 128 + 64 + 64 + 128 + 384 + 384 + 128
GROUPS = 128 + 64 + 64 + 128 + 384 + 384 + 3 * 128
NORMS = 2 * 128
BYTES: dict[FormatName, int] = {
    "dense": 2 * WEIGHTS + 2 * NORMS,
    "int8": WEIGHTS + 2 * OUTPUTS + 2 * NORMS,
    "int4": WEIGHTS // 2 + 4 * GROUPS + 2 * NORMS,
    "int3": WEIGHTS * 3 // 8 + 4 * GROUPS + 2 * NORMS,
}


@pytest.mark.parametrize(("name", "expected"), BYTES.items())
def test_layer_weights(name: FormatName, expected: int) -> None:
    assert layer_weights_bytes(a_model().layers[0], name, "bfloat16") == expected


@pytest.mark.parametrize(
    ("mode", "name", "bits", "expected"),
    [
        ("selfPrecision", "any8", 4, OUTPUTS * 2**4 * 2),
        ("selfPrecision", "any5", 3, OUTPUTS * 2**3 * 2),
        ("selfPrecision", "dense", 4, WEIGHTS * 4 // 8 + OUTPUTS * 2**4 * 2),
        ("selfPrecision", "any4", 4, 0),
        ("selfPrecision", "int8", 4, 0),
        ("auto", "any8", 4, OUTPUTS * 2**4 * 2),
        ("auto", "dense", 4, 0),
        ("suffix", "any8", 4, 0),
        ("none", "dense", 4, 0),
    ],
)
def test_what_linears_draft_with(mode: SpeculationMode, name: FormatName, bits: int, expected: int) -> None:
    layer = a_model().layers[0]
    more = layer_weights_bytes(layer, name, "bfloat16", Speculation(mode, 4, bits))
    assert more - layer_weights_bytes(layer, name, "bfloat16") == expected


def test_biases_stay_in_the_compute_type() -> None:
    plain, biased = (a_model(attention_bias=bias).layers[0] for bias in (False, True))
    extra = 128 + 64 + 64 + 128
    for name in BYTES:
        difference = layer_weights_bytes(biased, name, "float32") - layer_weights_bytes(plain, name, "float32")
        assert difference == 4 * extra


def test_fused_experts_are_stored_as_the_layer_is() -> None:
    layer = Model.from_config(
        {
            "model_type": "mixtral",
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": 16,
            "max_position_embeddings": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
    ).layers[0]
    experts = 4 * 3 * 64 * 32
    low, high = (layer_weights_bytes(layer, name, "bfloat16") for name in ("int4", "dense"))
    other = sum(each.weight_bytes("int4", "bfloat16") for each in layer.linears if each.copies == 1)
    gates_and_ups, downs = 4 * (64 * 64 // 2 + 64 * 4), 4 * (64 * 32 // 2 + 64 * 4)  # a group a row
    assert low == gates_and_ups + downs + other + 2 * layer.other_parameters
    assert high - low > 1.4 * experts


def test_kv_of_one_token() -> None:
    layer = a_model().layers[0]
    assert kv_bytes_per_token(layer, 16, "bfloat16") == 2 * 2 * 32 * 2
    assert kv_bytes_per_token(layer, 16, "float32") == 2 * 2 * 32 * 4


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16", "float32"])
def test_kv_at_8_bits_counts_a_scale_per_head(compute_type: ComputeType) -> None:
    layer = a_model().layers[0]
    assert kv_bytes_per_token(layer, 8, compute_type) == 2 * 2 * (32 + 2)
    assert 2 * kv_bytes_per_token(layer, 8, compute_type) < 1.1 * kv_bytes_per_token(layer, 16, compute_type)


def test_a_tied_table_lies_where_it_is_used() -> None:
    tied, apart = a_model(tie_word_embeddings=True), a_model()
    table, norm = 512 * 128 * 2, 128 * 2

    def both(model: Model, *, embedding: bool, head: bool) -> int:
        return embedding_bytes(model, embedding=embedding, head=head, compute_type="bfloat16")

    assert both(tied, embedding=True, head=True) == table + norm
    assert both(apart, embedding=True, head=True) == 2 * table + norm
    assert both(tied, embedding=True, head=False) == table
    assert both(tied, embedding=False, head=True) == table + norm
    assert both(tied, embedding=False, head=False) == 0


def test_a_head_of_8_bits_lies_beside_the_embedding_even_where_they_are_tied() -> None:
    table, norm, rounded = 512 * 128 * 2, 128 * 2, stored_bytes("int8", 512, 128, "bfloat16")
    for tied in (False, True):
        model = a_model(tie_word_embeddings=tied)
        model = msgspec.structs.replace(model, head_format="int8")
        ends = [(True, True), (True, False), (False, True), (False, False)]
        sizes = [embedding_bytes(model, embedding=a, head=b, compute_type="bfloat16") for a, b in ends]
        assert sizes == [table + rounded + norm, table, rounded + norm, 0]
