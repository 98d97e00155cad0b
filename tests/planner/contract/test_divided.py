"""What several devices of a stage can share, by config.json alone."""

from typing import Any

import pytest

from strata_planner.contract.architectures import SUPPORTED, UnsupportedModelError
from strata_planner.contract.divided import check_divided, check_groups

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}
LATENT = PLAIN | {"model_type": "deepseek_v3", "kv_lora_rank": 56, "head_dim": 16}
DELTA = PLAIN | {"model_type": "qwen3_next", "head_dim": 64}


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_every_model_that_runs_can_be_shared(name: str) -> None:
    check_divided(PLAIN | {"model_type": name})


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (PLAIN, 0),
        (PLAIN | {"head_dim": 48}, 48),
        (LATENT | {"v_head_dim": 64}, 0),
        (LATENT | {"v_head_dim": 24}, 24),
        (DELTA, 0),
        (DELTA | {"linear_value_head_dim": 24}, 24),
        (DELTA | {"linear_value_head_dim": 24, "layer_types": ["full_attention"] * 4}, 0),
        (PLAIN | {"model_type": "lfm2", "full_attn_idxs": [1]}, 0),
        ({"model_type": "qwen3_5", "text_config": DELTA | {"model_type": "qwen3_5_text", "head_dim": 40}}, 40),
    ],
)
def test_groups_are_cut_between_heads_that_are_whole_groups_wide(config: dict[str, Any], width: int) -> None:
    """Of whatever the projection behind the heads takes from each."""
    if not width:
        check_groups(config, 4)
        return
    with pytest.raises(UnsupportedModelError, match=f"groups of 4 bits .* heads are {width} wide, no multiple of 32"):
        check_groups(config, 4)
