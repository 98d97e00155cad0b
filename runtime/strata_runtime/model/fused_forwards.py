"""Forwards that take one native call where transformers' own take many: of norms, rotary attention, gated MLPs, whole layers and whole decoders in bfloat16 on processors.

Used by the adapter. A module gets one if its own forward is, instruction for instruction, one of those that transformers copies into most models: Llama's,
Mistral's, Qwen's. One that computes otherwise keeps its own, and what the native library does not take goes the module's own way.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from strata_runtime.kernels import native_dense, native_rowwise
from strata_runtime.model.fused_decoder import FusedDecoder
from strata_runtime.model.fused_layer import FusedLayer, forward_of
from strata_runtime.model.same_code import goes_as_llama, is_the_same

Attention = Callable[..., tuple[torch.Tensor, None]]


def fuse(model: torch.nn.Module, attention: Attention) -> None:
    """Give the modules of a model such forwards, where this processor has any use for them."""
    if not native_dense.runs():
        return
    for module in model.modules():
        for known, fused in _FORWARDS:
            if is_the_same(type(module).forward, known.forward) and fused.suits(module):
                module.forward = partial(fused.forward, module, module.forward, attention)
    for module in model.modules():
        if (layer := _layer(module)) is not None:
            module.forward = partial(layer.forward, module.forward)
    for module in model.modules():
        if (decoder := FusedDecoder.of(module)) is not None:
            module.forward = partial(decoder.forward, module.forward)


def _layer(module: Any) -> FusedLayer | None:
    """Of a decoder layer, all of whose parts have got such forwards and whose own nobody has replaced."""
    if "forward" in vars(module) or not hasattr(module, "self_attn") or not goes_as_llama(module):
        return None
    parts = (module.input_layernorm, module.self_attn, module.post_attention_layernorm, module.mlp)
    fused = [forward_of(vars(part).get("forward")) for part in parts]
    kinds = (_Norm, _RotaryAttention, _Norm, _GatedMlp)
    if not all(isinstance(each, kind) for each, kind in zip(fused, kinds, strict=True)):
        return None
    attention: _RotaryAttention = fused[1]
    return FusedLayer.of(module, attention.window(module.self_attn))


class _Norm:
    def suits(self, module: Any) -> bool:
        return module.weight.dtype is torch.bfloat16

    def forward(self, module: Any, own: Callable[..., Any], _attention: Attention, rows: torch.Tensor) -> Any:
        if not native_rowwise.takes(rows):
            return own(rows)
        return native_rowwise.rms_norm(rows, module.weight, module.variance_epsilon)


class _GatedMlp:
    def suits(self, module: Any) -> bool:
        return isinstance(module.act_fn, SiLUActivation | torch.nn.SiLU)

    def forward(self, module: Any, own: Callable[..., Any], _attention: Attention, rows: torch.Tensor) -> Any:
        if not native_rowwise.takes(rows):
            return own(rows)
        return module.down_proj(native_rowwise.gate(module.gate_proj(rows), module.up_proj(rows)))


class _RotaryAttention:
    """`window`: where the module finds how far back it sees; None: it sees all."""

    def __init__(self, window: Callable[[Any], int | None], *, norms: bool = False) -> None:
        self.window, self._norms = window, norms

    def suits(self, module: Any) -> bool:
        names = vars(sys.modules[type(module).__module__])
        return all(
            is_the_same(names.get(each.__name__), each) for each in (llama.apply_rotary_pos_emb, llama.rotate_half)
        )

    def forward(
        self,
        module: Any,
        own: Callable[..., Any],
        attention: Attention,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **given: Any,
    ) -> Any:
        cos, sin = position_embeddings
        if (
            not native_rowwise.takes(hidden_states)
            or cos.dtype is not torch.bfloat16
            or cos.shape[-1] != module.head_dim
        ):
            return own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **given)
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        query, key = module.q_proj(hidden_states).view(shape), module.k_proj(hidden_states).view(shape)
        value = module.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self._norms:
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        for each in (query, key):
            native_rowwise.rotate(each[0], cos[0], sin[0])
        window = self.window(module)
        attended, _ = attention(
            module, query, key, value, attention_mask, scaling=module.scaling, sliding_window=window, **given
        )
        return module.o_proj(attended.flatten(2)), None


def _all(_module: Any) -> None:
    return None


def _of_layer(module: Any) -> int | None:
    window: int | None = module.sliding_window
    return window


def _of_model(module: Any) -> int | None:
    window: int | None = getattr(module.config, "sliding_window", None)
    return window


_FORWARDS: tuple[tuple[Any, Any], ...] = (
    (llama.LlamaRMSNorm, _Norm()),
    (llama.LlamaMLP, _GatedMlp()),
    (llama.LlamaAttention, _RotaryAttention(_all)),
    (mistral.MistralAttention, _RotaryAttention(_of_model)),
    (qwen2.Qwen2Attention, _RotaryAttention(_of_layer)),
    (qwen3.Qwen3Attention, _RotaryAttention(_of_layer, norms=True)),
)
