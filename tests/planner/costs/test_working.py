"""Laws of what a stage holds beside weights and KV, and moments counted by hand."""

from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.formats import FORMAT_NAMES, ComputeType, FormatName
from strata_planner.contract.rows import padded_rows
from strata_planner.costs.working import (
    FLOAT32_BUFFER_BYTES,
    KERNEL_BYTES,
    MASK_ROWS,
    MODULE_BYTES,
    StepShape,
    Storage,
    WorkingMemory,
    row_numbers,
    working_memory,
)
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from tests.planner.builders import a_model, a_wide_model

STEP = StepShape(tokens=16, sampled=4, context=64)
GEMMA2 = {"model_type": "gemma2", "head_dim": 32}


def of(
    *formats: FormatName,
    step: StepShape = STEP,
    model: Model | None = None,
    compute_type: ComputeType = "bfloat16",
    on_cpu: bool = True,
    head: bool = False,
    kv_bits: int = 16,
    packed_rows: Mapping[FormatName, int] | None = None,
) -> WorkingMemory:
    storage = Storage(frozenset(formats), compute_type, on_cpu, kv_bits, frozenset((packed_rows or {}).items()))
    return working_memory(model or a_model(), step, storage, head=head)


@given(st.integers(1, 5000))
def test_rows_are_padded_as_the_runtime_pads_them(rows: int) -> None:
    assert padded_rows(rows) >= rows
    assert padded_rows(padded_rows(rows)) == padded_rows(rows)
    assert rows < 16 or padded_rows(rows) <= 1.5 * rows
    assert rows < 64 or padded_rows(rows) <= 1.25 * rows
    assert row_numbers(1, rows) == len({padded_rows(each) for each in range(1, rows + 1)})


def test_more_tokens_never_take_less() -> None:
    for name in ("dense", "int8", "int4"):
        steps = [StepShape(tokens, 4, 4096) for tokens in (1, 16, 100, 256, 2048)]
        assert all(less <= more for less, more in pairwise(of(name, step=step).serving for step in steps))


def test_a_kernel_for_every_shape_and_number_of_rows() -> None:
    shapes = {(128, 128), (64, 128), (384, 128), (128, 384)}
    assert of("dense").kernels == len(shapes) * row_numbers(1, 16) * KERNEL_BYTES
    assert of("dense", head=True).kernels - of("dense").kernels == row_numbers(1, 4) * KERNEL_BYTES


def test_what_is_multiplied_as_it_is_stored_needs_no_kernel() -> None:
    assert of("int8").kernels == 0
    assert of("int8", step=StepShape(24, 4, 64)).kernels == 4 * KERNEL_BYTES
    assert of("int4", step=StepShape(48, 4, 64)).kernels == 0


def test_a_devices_own_limits_of_packed_rows_count() -> None:
    step = StepShape(64, 4, 64)
    longer, shorter = (of("int4", step=step, packed_rows={"int4": rows}).kernels for rows in (48, 32))
    assert longer == of("int4", step=step).kernels
    assert shorter == longer + 4 * KERNEL_BYTES  # those of 48 rows
    assert of("int4", step=step, packed_rows={"int4": 1 << 62, "int8": 0}).kernels == 0


def test_packed_16_bit_weights_keep_no_kernels_and_attention_gathers_nothing() -> None:
    packed = of("dense", head=True, packed_rows={"dense": 1 << 62})
    assert packed.kernels == 0
    assert packed.layer < of("dense", head=True).layer
    assert (
        of("dense", compute_type="float16", packed_rows={"dense": 1 << 62}).layer
        == of("dense", compute_type="float16").layer
    )


def test_a_stage_packs_as_its_devices_profile_says() -> None:
    given = {"packedRows": {"int4": 32}}
    (device,) = Cluster((Node("a", (Device("cpu", profile=given),)),)).accelerators()
    assert Storage.on(device, frozenset({"int4"}), "bfloat16", 16).packed_rows == {("int4", 32)}


def test_a_product_in_float32_packs_its_weight_and_keeps_nothing() -> None:
    assert of("dense", compute_type="float32").kernels == 0
    on_cpu, on_gpu = (of("dense", compute_type="float32", on_cpu=each, head=True) for each in (True, False))
    assert on_cpu.logits - on_gpu.logits == FLOAT32_BUFFER_BYTES
    holes = 2 * 16 * 384 * 4
    assert FLOAT32_BUFFER_BYTES < on_cpu.layer <= on_gpu.layer + FLOAT32_BUFFER_BYTES + holes


def test_a_mixed_stage_keeps_the_kernels_of_both() -> None:
    step = StepShape(64, 4, 64)
    assert of("dense", "int4", step=step).kernels == of("dense", step=step).kernels + of("int4", step=step).kernels


def test_only_the_head_has_logits() -> None:
    assert of("dense").logits == 0
    assert of("dense", head=True).logits == 4 * 512 * (2 + 4)
    assert of("dense", head=True, compute_type="float32", on_cpu=False).logits == 4 * 512 * 4


def test_pieces_are_bounded_however_large_the_layer() -> None:
    wide = a_wide_model()
    assert of("int4", model=wide).layer - of("dense", model=wide).layer < 20 << 20
    assert of("int4", model=wide).layer > of("int8", model=wide).layer > of("dense", model=wide).layer


def test_a_prompt_in_chunks_has_masks_and_gathers_its_past() -> None:
    whole, chunked = (of("dense", step=StepShape(512, 1, context)) for context in (512, 4096))
    assert chunked.layer > whole.layer + 512 * 4096


def test_a_masks_copy_is_bounded_and_its_bits_are_not() -> None:
    near, far = (of("dense", step=StepShape(2048, 1, context)).layer for context in (8192, 16_384))
    keys = 16_384 - 8192
    gathered = 2 * keys * 2 * 32 * 2
    assert far - near == 2048 * keys + MASK_ROWS * keys * 2 + gathered


def test_soft_caps_have_kernels_of_their_own() -> None:
    plain, capped = (of("int8", step=StepShape(16, 4, 64), model=a_model(**changes)) for changes in ({}, GEMMA2))
    assert plain.kernels == 0
    kernels = 2 + 1 + 1  # 16 and 32 rows; 64 keys of prompts, and of decoding sequences
    assert capped.kernels == 2 * kernels * KERNEL_BYTES


@given(st.integers(1, 600), st.integers(1, 4096))
def test_fused_gates_stay_while_their_product_is_projected(tokens: int, context: int) -> None:
    step = StepShape(tokens, 1, max(tokens, context))
    models = [a_model(model_type=kind) for kind in ("llama", "phi3")]
    apart, fused = (of("int8", step=step, model=model, on_cpu=False).layer for model in models)
    assert fused >= apart


def test_gates_apart_leave_two_holes_of_their_size_in_a_processors_heap() -> None:
    step = StepShape(tokens=512, sampled=1, context=512)
    apart, on_gpu = (of("dense", step=step, on_cpu=on_cpu).layer for on_cpu in (True, False))
    assert apart - on_gpu == 2 * 512 * 384 * 2
    fused = a_model(model_type="phi3")
    assert of("dense", step=step, model=fused).layer == of("dense", step=step, model=fused, on_cpu=False).layer


def test_experts_are_computed_some_rows_at_a_time() -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = Model.from_config(config)
    some, many = (of("dense", model=model, step=StepShape(tokens, 1, 64)).layer for tokens in (128, 256))
    assert many < 2 * some
    assert of("dense", model=model).loading > 2 * 4 * 2 * 512 * 64 * 2


def test_quantized_experts_are_read_one_by_one_and_brought_back_one_by_one() -> None:
    model = a_model(model_type="qwen3_moe", num_experts=64, num_experts_per_tok=4, moe_intermediate_size=256)
    expert = 2 * 256 * 128
    whole, alone = (of(name, model=model).loading for name in ("dense", "int4"))
    assert whole >= 2 * 64 * expert * 2
    assert alone - MODULE_BYTES == 6.5 * expert  # as it was read, and its pieces
    step = StepShape(64, 1, 64)
    dense, rounded = (of(name, model=model, step=step).layer for name in ("dense", "int4"))
    assert rounded - dense == 6.5 * expert + 64 * 512 * 2


def test_products_of_routers_and_of_experts_leave_kernels_for_their_numbers_of_rows() -> None:
    plain, routed = (
        a_model(),
        a_model(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48),
    )
    one = of("dense", model=routed, step=StepShape(1, 1, 64)).kernels
    assert one == (2 + 2 + 1) * KERNEL_BYTES  # shapes of attention, of experts, and the router's
    few, many = (of("w8a8", model=routed, step=StepShape(tokens, 1, 64)).kernels for tokens in (1, 256))
    assert (
        many - few == (row_numbers(1, 256) - 1) * KERNEL_BYTES
    )  # the router's alone: experts are multiplied as they are stored
    assert of("w8a8", model=plain, step=StepShape(256, 1, 64)).kernels == 0


def test_what_says_how_fast_states_decay_keeps_kernels_whatever_is_packed() -> None:
    kinds = ["linear_attention", "full_attention"] * 3
    stateful = a_model(model_type="qwen3_next", layer_types=kinds, num_experts=0, head_dim=32)
    step = StepShape(256, 1, 64)
    assert of("w8a8", model=stateful, step=step).kernels == row_numbers(1, 256) * KERNEL_BYTES
    assert of("w8a8", model=a_model(model_type="lfm2", layer_types=["conv"] * 6), step=step).kernels == 0


def test_float8_is_decoded_a_million_weights_at_a_time() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    stored = a_model(**sizes, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    step = StepShape(1, 1, 64)
    cases: list[tuple[FormatName, Model]] = [("fp8_e4m3", a_model(**sizes)), ("fp8_block", stored)]
    for name, model in cases:
        working = of(name, model=model, step=step)
        assert 8 << 20 < working.layer < 9 << 20
        assert working.kernels == 3 * KERNEL_BYTES  # pieces of 512 rows; of `down`, 170 rows and 8 that are left


def test_the_peak_is_reached_while_loading_only_where_kv_is_small() -> None:
    terms = of("int4")
    assert terms.peak(kv_bytes=1 << 40) == terms.serving
    assert WorkingMemory(1, 0, 0, 0, 0, loading=50).peak(kv_bytes=10) == 40


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("compute_type", ["bfloat16", "float32"])
def test_every_format_has_a_working_memory(name: FormatName, compute_type: ComputeType) -> None:
    assert 0 < of(name, compute_type=compute_type).serving < 1 << 30


def test_keys_and_values_at_8_bits_are_gathered_as_codes_first() -> None:
    step = StepShape(tokens=16, sampled=16, context=4096)
    whole, rounded = (of("dense", step=step, kv_bits=bits).layer for bits in (16, 8))
    gathered = 2 * 4096 * 2 * 32 * 2 * 16
    assert gathered == 16 << 20
    own = 2 * 2 * 32 * 16 * 2
    assert rounded - whole == gathered // 2 + own


def test_a_gpus_share_of_the_process_is_in_its_overhead() -> None:
    terms = of("dense", on_cpu=False)
    assert (terms.modules, terms.kernels) == (0, 0)


@pytest.mark.parametrize("field", fields(WorkingMemory), ids=lambda field: field.name)
def test_every_term_is_named_in_the_text(field: object) -> None:
    assert getattr(field, "name", "") in str(of("dense"))
