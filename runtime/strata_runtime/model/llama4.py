"""What Llama 4 does otherwise: attention within chunks, layers without positions, and experts whose inputs are weighed.

Used by the adapter (experts) and `own_attention` (attention). transformers counts positions for its attention temperature from the begin of the
batch, and multiplies every token with every expert.
"""

from functools import partial
from typing import Any

import torch

from strata_runtime.model.experts import experts


def attention_forward(module: Any, attention: Any, *, hidden_states: torch.Tensor, **given: Any) -> Any:
    """The forward of Llama4TextAttention over the pages of the step's batch."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (
        project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        query, key = (_turned(each, given["position_embeddings"]) for each in (query, key))
    elif module.attn_temperature_tuning:
        query = (query * _temperature(module)).to(query.dtype)
    if hasattr(module, "qk_norm"):  # of layers with positions alone
        query, key = module.qk_norm(query), module.qk_norm(key)
    config = module.config
    chunked = config.layer_types[module.layer_idx] == "chunked_attention"
    attended, _ = attention(
        module,
        *(each.transpose(1, 2) for each in (query, key, value)),
        None,
        scaling=module.scaling,
        chunk=config.attention_chunk_size if chunked else None,
    )
    return module.o_proj(attended.flatten(2)), None


def use_routed_experts(model: Any) -> None:
    """Each token goes to the experts that it is sent to, and to no others."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            routed = module.experts
            routed.weigh_inputs = routed.has_gate = True
            routed.has_bias = routed.has_post_expert_norm = False
            routed._apply_gate = partial(_gated, routed)  # noqa: SLF001, what transformers gives to experts of its interface
            routed.forward = partial(experts, routed)
            module.forward = partial(_moe_forward, module)


def _moe_forward(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(rows)
    weights, chosen = scores.topk(module.top_k, dim=1)
    return module.shared_expert(rows) + module.experts(rows, chosen, weights), logits


def _gated(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gated: torch.Tensor = up * module.act_fn(gate)
    return gated


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """heads: [1, tokens, heads, head_dim], each pair of values a complex number; turns: [1, tokens, head_dim / 2]."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, :, None]).flatten(-2).type_as(heads)


def _temperature(module: Any) -> torch.Tensor:
    """[1, tokens, 1, 1]: grows with the position (arXiv 2501.19399)."""
    places: torch.Tensor = module.strata_step.positions.float() + 1.0
    scale: torch.Tensor = torch.log1p(torch.floor(places / module.floor_scale)) * module.attn_scale + 1.0
    return scale[..., None, None]
