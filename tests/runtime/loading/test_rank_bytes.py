"""What a rank of a stage holds is what the planner counts for its device: weights in every format, keys and values, latents, states."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.formats import FormatName
from strata_planner.contract.shares import Shares, equal
from strata_planner.costs.memory import kv_bytes_per_token, layer_weights_bytes, state_bytes_per_sequence
from strata_planner.costs.shards import Portion, portion_of
from strata_planner.question.model import Model
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.slot.role_cache import cache_of
from tests.laws import swept
from tests.runtime.architectures import ALL, make_tiny_model
from tests.runtime.loading.shared import part
from tests.runtime.loading.stages import roles
from tests.runtime.ranks.together import together

# Whole tiles, groups and experts for every rank of those shares.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128}
LATENT: dict[str, Any] = (
    WIDE
    | EXPERTS
    | {
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "kv_lora_rank": 28,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
    }
)
DELTA: dict[str, Any] = WIDE | {
    "num_key_value_heads": 8,
    "head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
ROUTED: dict[str, Any] = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_key_value_heads": 8},
    "deepseek_v3": LATENT,
    "deepseek_v3-one-query": LATENT,
    "qwen3_next": DELTA | ROUTED,
    "qwen3_5": DELTA,
    "lfm2": WIDE | {"hidden_size": 512, "num_key_value_heads": 8},
    "lfm2-bias": WIDE | {"hidden_size": 512, "num_key_value_heads": 8},
}
SHARES: list[Shares] = [equal(2), (3, 1), (5, 2, 1), equal(8)]
UNLIKE: list[Shares] = [(3, 1), (1, 2, 4)]
CONSTANTS = {"apertus": 6 * 8}  # of its activation, in each layer
FORMATS: list[FormatName] = ["dense", "int8", "int4", "fp8_e4m3"]
CASES = [(name, shares, form) for name in MODELS for shares in SHARES for form in FORMATS]
CASES += [(name, shares, form) for name in ("qwen3_5", "lfm2") for shares in SHARES for form in ("any4", "w8a8")]
STANDING: list[tuple[str, Shares, FormatName]] = [
    ("deepseek_v3", (3, 1), "int8"),
    ("qwen3_next", (5, 2, 1), "int4"),
    ("qwen3_5", (3, 1), "dense"),
    ("lfm2-bias", equal(2), "dense"),
]


def weights_of(stage: StageModel) -> int:
    layers = [module for layer in stage.layers for module in layer.modules()]
    tensors = chain.from_iterable((*each.parameters(recurse=False), *each.buffers(recurse=False)) for each in layers)
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("case", swept(CASES, STANDING), ids=str)
def test_a_rank_holds_what_the_planner_counts(case: tuple[str, Shares, FormatName], tmp_path: Path) -> None:
    name, shares, form = case
    check(make_tiny_model(tmp_path, name, **MODELS[name]), shares, form)


@pytest.mark.parametrize("shares", swept(UNLIKE, UNLIKE[1:]), ids=str)
@pytest.mark.parametrize("name", swept(sorted(ALL), ["cohere", "gpt_oss"]))
def test_of_every_architecture(name: str, shares: Shares, tmp_path: Path) -> None:
    """Whose heads, columns and experts do not divide."""
    check(make_tiny_model(tmp_path, name), shares, "dense", CONSTANTS.get(name, 0))


def check(model: Path, shares: Shares, form: FormatName, beside: int = 0) -> None:
    """`beside`: bytes that no weight takes."""
    [role] = roles(model, 1, formats=[form] * 6)
    role = structs.replace(role, shares=() if len(set(shares)) == 1 else shares)

    def body(collectives: SharedMemory) -> tuple[int, int]:
        stage = part(role, model, collectives)
        return weights_of(stage), cache_of(role, stage).bytes

    shape = Model.from_folder(model)
    for rank, (weights, kept) in enumerate(together(len(shares), body)):
        own = [portion_of(layer, Portion(shares, rank)) for layer in shape.layers]
        assert kept == role.kv_page_budget * role.page_tokens * sum(
            kv_bytes_per_token(each, 16, role.compute_type) for each in own
        ) + role.state_slots * sum(state_bytes_per_sequence(each, role.compute_type) for each in own)
        assert weights - beside == sum(layer_weights_bytes(each, form, role.compute_type) for each in own)
