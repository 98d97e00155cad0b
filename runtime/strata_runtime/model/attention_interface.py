"""Attention as the layers of transformers' models call it: registered with it, over the pages of the step's batch.

Used by the adapter.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from strata_runtime.model.attention import attend
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.mixers import own_mixer
from strata_runtime.model.own_attention import own_forward
from strata_runtime.model.strategies import Switch

ATTENTION = "strata"


@dataclass
class Step:
    """Where the attention of every layer of one stage finds the batch: not all architectures hand keywords down to it."""

    batch: Batch | None = None
    positions: torch.Tensor | None = None  # of all rows [1, rows], padded ones too
    rules: dict[int, AttentionRule] = field(default_factory=dict)  # of each layer, once it has been called
    # Layers, in all steps: the native library counts here, too.
    begun: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    switch: Switch | None = None  # of their strategy; None: they know one alone


def use_attention_of_pages(model: Any) -> None:
    """Every attention layer of a transformers model calls `attention`; those that know no interface are given a forward that does, and layers that
    keep state one that keeps it for each sequence.
    """
    if model._can_set_attn_implementation():  # noqa: SLF001, else the setter warns and does nothing
        model.set_attn_implementation(ATTENTION)
    model.config._attn_implementation_internal = ATTENTION  # noqa: SLF001, so that the model makes no masks
    for module in model.modules():
        forward = own_forward(module, attention) or own_mixer(module)
        if forward is not None:
            module.forward = forward


def attention(  # noqa: PLR0913, PLR0917, transformers' own signature
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001, the batch has its own
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chunk: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap, slopes, s_aux, chunk)
    batch = module.strata_step.batch
    module.strata_step.rules[module.layer_idx] = rule
    module.strata_step.begun.value += 1
    tokens, rows = batch.tokens, query.shape[2]
    if rows == tokens:
        return attend(batch, module.layer_idx, query[0], key[0], value[0], rule)[None], None
    out = attend(batch, module.layer_idx, query[0, :, :tokens], key[0, :, :tokens], value[0, :, :tokens], rule)
    return functional.pad(out, (0, 0, 0, 0, 0, rows - tokens))[None], None


AttentionInterface.register(ATTENTION, attention)
