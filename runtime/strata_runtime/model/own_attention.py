"""Forwards for attention layers that transformers wrote before it had an interface for attention: they project, and leave the rest to it.

Used by `attention_interface`. A forward here takes what the layer around it hands down and gives back what that layer expects.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from strata_runtime.model import latent, llama4
from strata_runtime.model.rotary import turned_halves

Attention = Callable[..., tuple[torch.Tensor, None]]


def own_forward(module: Any, attention: Attention) -> Callable[..., Any] | None:
    """The forward to be used in place of the module's; None: its own calls the interface, or it is no attention."""
    forward = _FORWARDS.get(type(module).__name__)
    return None if forward is None else partial(forward, module, attention)


def _bloom(module: Any, attention: Attention, hidden: torch.Tensor, residual: torch.Tensor, **_given: Any) -> Any:
    heads: int = module.num_heads
    query, key, value = _split(module.query_key_value(hidden), heads, heads)
    first, last, count = getattr(module, "own_queries", (0, heads, heads))  # of several ranks, the whole model's
    slopes = alibi_slopes(count, hidden.device)[first:last]
    attended, _ = attention(module, query, key, value, None, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(attended.flatten(2)) + residual, None


def _falcon(module: Any, attention: Attention, hidden: torch.Tensor, **given: Any) -> Any:
    query, key, value = _split(module.query_key_value(hidden), module.num_heads, module.num_kv_heads)
    cos, sin = (each[:, None] for each in given["position_embeddings"])
    query, key = turned_halves(query, cos, sin), turned_halves(key, cos, sin)
    attended, _ = attention(module, query, key, value, None, scaling=module.inv_norm_factor)
    return module.dense(attended.flatten(2)), None


_FORWARDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "DeepseekV3Attention": latent.attention_forward,
    "Glm4MoeLiteAttention": latent.attention_forward,
    "FalconAttention": _falcon,
    "Llama4TextAttention": llama4.attention_forward,
}


def _split(fused: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fused: [1, tokens, width], for each key head its queries, its key and its value -> each [1, heads or kv_heads, tokens, head_dim]."""
    batch, tokens, _ = fused.shape
    parts = fused.view(batch, tokens, kv_heads, heads // kv_heads + 2, -1)
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


@lru_cache
def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """[heads] float32. Of a number of heads that is no power of two: those of the power below, then every other one of the power above."""
    below = 2 ** int(math.log2(heads))
    slopes = [_slope(below, place) for place in range(1, below + 1)]
    slopes += [_slope(2 * below, place) for place in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _slope(heads: int, place: int) -> float:
    return float(2.0 ** (-8 * place / heads))
