"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over what is kept of it: one entry of a token for all heads.

Used by `own_attention`. Keys and values are never made of the entries: queries are brought to the entries' width instead, and what is attended
back from there, which is the same product in another order (the paper's appendix C).
"""

from typing import Any

import torch

from strata_runtime.model.rotary import turned_halves, turned_pairs


def attention_forward(module: Any, attention: Any, *, hidden_states: torch.Tensor, **given: Any) -> Any:
    """The forward of DeepseekV3Attention and its like over the pages of the step's batch."""
    turned = turned_pairs if module.config.rope_interleave else turned_halves
    cos, sin = (each[:, None] for each in given["position_embeddings"])
    rank: int = module.kv_lora_rank
    to_keys, to_values = module.kv_b_proj.weight.view(module.num_heads, -1, rank).split(
        [module.qk_nope_head_dim, module.v_head_dim], dim=1
    )
    plain, placed = torch.split(
        _queries(module, hidden_states), [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1
    )
    query = torch.cat((plain @ to_keys, turned(placed, cos, sin)), dim=-1)
    latent, key = module.kv_a_proj_with_mqa(hidden_states).split([rank, module.qk_rope_head_dim], dim=-1)
    entry = torch.cat((module.kv_a_layernorm(latent)[:, None], turned(key[:, None], cos, sin)), dim=-1)
    attended, _ = attention(module, query, entry, entry, None, scaling=module.scaling)
    values = attended[..., :rank].transpose(1, 2) @ to_values.mT
    return module.o_proj(values.transpose(1, 2).flatten(2)), None


def _queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, width]."""
    if module.q_lora_rank is None:
        queries = module.q_proj(hidden)
    else:
        queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
    heads: torch.Tensor = queries.view(*hidden.shape[:-1], module.num_heads, -1).transpose(1, 2)
    return heads
