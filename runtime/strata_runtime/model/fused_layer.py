"""The forward of a decoder layer that goes as Llama's: for few tokens one call of the native library, which its linears name their weights for.

Given to layers by `fused_forwards`. What the library does not take goes the layer's own way, to the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strata_runtime.kernels import native_attention, native_layer, native_rowwise
from strata_runtime.kernels.native_layer import MOST_TOKENS, Norms, Seen
from strata_runtime.model.attention_rule import AttentionRule


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """`norms`, `linears`: modules, as `native_layer.layer` names them; of linears with their attribute: what is there may be replaced between two steps."""

    attention: Any
    norms: tuple[Any, Any, Any, Any]
    linears: tuple[tuple[Any, str], ...]
    rule: AttentionRule
    work_columns: int

    @classmethod
    def of(cls, layer: Any, window: int | None) -> "FusedLayer | None":
        """`window`: of its attention. None: norms of several epsilons, or linears that the library does not know, as those that ranks share."""
        attention, mlp = layer.self_attn, layer.mlp
        own = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *own)
        if len({each.variance_epsilon for each in norms if each is not None}) > 1:
            return None
        linears = (
            *((attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *((mlp, name) for name in ("gate_proj", "up_proj", "down_proj")),
        )
        if not all(hasattr(getattr(parent, name), "native_product") for parent, name in linears):
            return None
        queries, keys, _, width, inner, *_ = (getattr(parent, name).out_features for parent, name in linears)
        columns = native_layer.work_columns(width, queries, keys, inner)
        return cls(attention, norms, linears, AttentionRule(attention.scaling, window), columns)

    def forward(
        self,
        own: Callable[..., Tensor],
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **given: Any,
    ) -> Tensor:
        """hidden_states: [1, rows, width]; as the layer's own."""
        products = self._products(hidden_states, position_embeddings)
        if products is None:
            return own(hidden_states, position_embeddings=position_embeddings, **given)
        assert position_embeddings is not None
        step, number = self.attention.strata_step, self.attention.layer_idx
        step.rules[number] = self.rule
        step.layers_begun += 1
        batch, pool = step.batch, step.batch.layers[number]
        seen = Seen(
            *position_embeddings,
            batch.places,
            pool.entries,
            batch.native_spans,
            batch.page_tokens,
            self.rule.scale,
            self.rule.window,
        )
        before, behind, query, key = (None if each is None else each.weight for each in self.norms)
        norms = Norms(before, behind, query, key, self.norms[0].variance_epsilon)
        out = native_layer.layer(hidden_states[0, : batch.tokens], norms, seen, products, self.work_columns)
        return functional.pad(out, (0, 0, 0, hidden_states.shape[1] - batch.tokens))[None]

    def _products(self, hidden: Tensor, positions: tuple[Tensor, Tensor] | None) -> list[bytes] | None:
        """Of its linears as they are now; None: the library does not take the step."""
        batch = self.attention.strata_step.batch
        if batch is None or batch.tokens > MOST_TOKENS or positions is None or not native_rowwise.takes(hidden):
            return None
        pool, width = batch.layers[self.attention.layer_idx], self.attention.head_dim
        if pool.entries is None or not native_attention.takes(hidden.dtype, hidden.device, width):
            return None
        if any(
            each.dtype is not torch.bfloat16 or each.shape[-1] != width or not each.is_contiguous()
            for each in positions
        ):
            return None
        if hidden.shape[0] != 1 or not hidden.is_contiguous() or batch.places.device.type != "cpu":
            return None
        named = [_product(getattr(parent, name), batch.tokens) for parent, name in self.linears]
        return [each for each in named if each is not None] if None not in named else None


def _product(linear: Any, tokens: int) -> bytes | None:
    """None, too, where somebody looks at what goes in or comes out."""
    named: Callable[[int], bytes | None] | None = getattr(linear, "native_product", None)
    if named is None or linear._forward_pre_hooks or linear._forward_hooks:  # noqa: SLF001
        return None
    return named(tokens)
