"""Plans of models whose sequences keep state: it is counted for as many as run at once, and nothing is shared or guessed."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.plan import NO_SPECULATION, Speculation
from strata_planner.contract.roles import roles_of
from strata_planner.contract.sequence_state import SequenceState
from strata_planner.costs.memory import PAGE_TOKENS, kv_bytes_per_token, layer_weights_bytes, state_bytes_per_sequence
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.shards import Portion, divisible, even, portion_of, shareable
from strata_planner.costs.source import Phase, Rates
from strata_planner.errors import InfeasibleError, ModelError, WorkloadError
from strata_planner.question.cluster import Cluster, LinkRate
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.running import keeps_to
from strata_planner.search.planning import make_plan
from tests.planner.builders import CARD, MIB, a_cluster, a_profile, a_request

# As published, what config.json of the 80B model leaves out is transformers' own.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "max_position_embeddings": 128000,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
}
SMALL: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 0,
    "max_position_embeddings": 2048,
}


def small(**changes: Any) -> Model:
    return Model.from_config(SMALL | changes)


def test_published_models_have_their_published_sizes() -> None:
    next_80b, lfm2 = Model.from_config(QWEN3_NEXT), Model.from_config(LFM2)
    assert round(next_80b.parameters / 1e9) == 80
    assert round(lfm2.parameters / 1e7) == 117
    assert [index for index, layer in enumerate(next_80b.layers) if not layer.state] == list(range(3, 48, 4))
    assert [index for index, layer in enumerate(lfm2.layers) if not layer.state] == LFM2["full_attn_idxs"]


def test_bytes_of_one_sequence() -> None:
    layer = Model.from_config(QWEN3_NEXT).layers[0]
    assert layer.state == SequenceState(channels=8192, inputs=3, heads=32, key_dim=128, value_dim=128)
    assert state_bytes_per_sequence(layer, "bfloat16") == 8192 * 3 * 2 + 32 * 128 * 128 * 4
    assert kv_bytes_per_token(layer, 16, "bfloat16") == 0
    short = Model.from_config(LFM2).layers[0]
    assert state_bytes_per_sequence(short, "float32") == 2048 * 2 * 4


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_stage_counts_keys_where_there_is_attention_and_state_of_all_sequences(kv_bits: int) -> None:
    request = a_request(a_cluster(16, 16), model=small(), kv_bits=kv_bits, min_stages=2)
    plan = make_plan(request).plan
    concurrency = plan.replicas[0].concurrency
    assert concurrency == request.workload.concurrency
    for stage in plan.stages:
        layers = request.model.layers[stage.layers[0] : stage.layers[1] + 1]
        token = sum(kv_bytes_per_token(each, kv_bits, plan.compute_type) for each in layers)
        sequence = sum(state_bytes_per_sequence(each, plan.compute_type) for each in layers)
        assert stage.memory.kv_bytes == stage.kv_page_budget * PAGE_TOKENS * token + concurrency * sequence
        assert stage.memory.total_bytes <= stage.devices[0].usable_bytes
    assert len({stage.kv_page_budget for stage in plan.stages}) == 1


def test_a_stage_without_any_attention_has_pages_of_nothing() -> None:
    kinds = ["linear_attention"] * 5 + ["full_attention"]
    plan = make_plan(a_request(a_cluster(16, 16, 16), model=small(layer_types=kinds), min_stages=3)).plan
    assert plan.stages[0].kv_page_budget == plan.stages[-1].kv_page_budget > 0


@pytest.mark.parametrize("concurrency", [20, 60, 100])
def test_the_state_of_every_sequence_has_its_place(concurrency: int) -> None:
    state = sum(state_bytes_per_sequence(each, "bfloat16") for each in small().layers)
    memory = make_plan(loaded_with(concurrency)).plan.stages[0].memory
    assert concurrency * state <= memory.kv_bytes < memory.total_bytes <= 64 * MIB


def test_more_sequences_than_states_find_room_for_are_not_planned() -> None:
    with pytest.raises(InfeasibleError):
        make_plan(loaded_with(200))


def loaded_with(concurrency: int) -> PlanRequest:
    load = Workload(prompt_tokens=32, output_tokens=16, concurrency=concurrency)
    return a_request(a_cluster(64), model=small(), workload=load, solver="pipeline")


def test_every_role_of_a_replica_knows_how_many_run_at_once() -> None:
    plan = make_plan(a_request(a_cluster(16, 16), model=small(), min_stages=2)).plan
    roles = [role for listed in roles_of(plan).values() for role in listed]
    assert [role.state_slots for role in roles] == [plan.replicas[0].concurrency] * 2
    plain = make_plan(a_request()).plan
    assert {role.state_slots for listed in roles_of(plain).values() for role in listed} == {0}


def test_nothing_is_shared_or_guessed() -> None:
    request = a_request(model=small(), speculation=Speculation("auto"))
    plan = make_plan(request).plan
    assert (plan.prefix_caching, plan.speculation) == (False, NO_SPECULATION)
    assert keeps_to(request, plan), "the same wishes keep the plan that they led to"


@pytest.mark.parametrize("mode", ["ngram", "suffix", "selfPrecision"])
def test_guesses_that_are_asked_for_by_name_are_refused(mode: Any) -> None:
    with pytest.raises(WorkloadError, match=f"speculation {mode}: sequences of 'qwen3_next' keep state"):
        make_plan(a_request(model=small(), speculation=Speculation(mode)))


def test_heads_or_channels_of_layers_with_state_are_shared_out() -> None:
    assert [degree for degree in (1, 2, 4, 8) if divisible(small(), degree)] == [1, 2, 4]
    assert [degree for degree in (1, 2, 3, 4, 5) if shareable(small(), degree)] == [1, 2, 3, 4]
    assert not divisible(small(linear_num_key_heads=1, linear_num_value_heads=2), 4), "of one half alone"
    assert divisible(Model.from_config(QWEN3_NEXT), 8)
    assert divisible(Model.from_config(LFM2), 8)


def test_state_of_a_device_is_that_of_its_heads() -> None:
    whole = Model.from_config(QWEN3_NEXT).layers[0]
    eighth = portion_of(whole, even(8))
    assert eighth.state == SequenceState(channels=1024, inputs=3, heads=4, key_dim=128, value_dim=128)
    assert 8 * state_bytes_per_sequence(eighth, "bfloat16") == state_bytes_per_sequence(whole, "bfloat16")
    small_layer = small().layers[0]
    quarters = [portion_of(small_layer, Portion((1, 1, 1, 1), rank)).state for rank in range(4)]
    assert {each and (each.heads, each.key_heads) for each in quarters} == {(1, 1)}, "two hold each key head"


@pytest.mark.parametrize("degree", [2, 4])
def test_a_stage_of_several_devices_counts_the_state_that_each_holds(degree: int) -> None:
    request = a_request(one_node(degree), model=small(), tensor_parallel=(degree,), solver="layout")
    plan = make_plan(request).plan
    (replica,) = plan.replicas
    (stage,) = replica.stages
    assert stage.tensor_parallel == degree
    layers = [portion_of(layer, even(degree)) for layer in request.model.layers]
    token = sum(kv_bytes_per_token(each, 16, plan.compute_type) for each in layers)
    sequence = sum(state_bytes_per_sequence(each, plan.compute_type) for each in layers)
    assert stage.memory.kv_bytes == stage.kv_page_budget * PAGE_TOKENS * token + replica.concurrency * sequence


def test_every_device_of_a_stage_holds_all_latents() -> None:
    model = Model.from_config(DEEPSEEK)
    request = a_request(one_node(4), model=model, tensor_parallel=(4,), solver="layout")
    (stage,) = make_plan(request).plan.stages
    token = sum(kv_bytes_per_token(each, 16, "bfloat16") for each in model.layers)
    assert stage.tensor_parallel == 4
    assert stage.memory.kv_bytes == stage.kv_page_budget * PAGE_TOKENS * token
    weights = sum(layer_weights_bytes(portion_of(each, even(4)), "dense", "bfloat16") for each in model.layers)
    assert stage.memory.weights_bytes == weights < sum(each.parameters for each in model.layers)


def one_node(devices: int) -> Cluster:
    (node,) = a_cluster(8).nodes
    (device,) = node.devices
    each = structs.replace(device, count=devices)
    return Cluster(
        (structs.replace(node, devices=(each,)),),
        intra_node=LinkRate(gbps=400, latency_ms=0.001),
        profiles={CARD: a_profile(type=CARD)},
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 must divide linear_num_value_heads 4"),
    "no heads": ({"linear_num_value_heads": 0}, "linear_num_value_heads is 0; a whole number of at least 1"),
    "kinds": ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries; one for each of 6 layers"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_numbers_that_make_no_state(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        small(**changes)


DECODING: dict[str, Callable[[int], Phase]] = {
    "sequences": lambda factor: Phase(factor, 1, 100),
    "tokens of a prompt": lambda factor: Phase(1, 1024 * factor, 512),
}


@pytest.mark.parametrize("phase", DECODING.values(), ids=DECODING)
def test_what_passes_a_state_takes_its_time(phase: Callable[[int], Phase]) -> None:
    rates, roofline = Rates(a_profile(), "float32", 16), Roofline()

    def mixing(factor: int, **changes: Any) -> float:
        layer, asked = small(**changes).layers[0], phase(factor)
        without = Phase(asked.sequences, asked.tokens, 0)
        return (
            roofline.layer(layer, "dense", rates, asked).seconds
            - roofline.layer(layer, "dense", rates, without).seconds
        )

    assert mixing(2) == pytest.approx(2 * mixing(1))
    assert mixing(1, linear_num_value_heads=8) > 1.5 * mixing(1)


def test_the_length_of_a_context_costs_nothing() -> None:
    layer, rates = small().layers[0], Rates(a_profile(), "float32", 16)
    short, long = (Roofline().layer(layer, "dense", rates, Phase(4, 1, context)) for context in (100, 100_000))
    assert short == long
