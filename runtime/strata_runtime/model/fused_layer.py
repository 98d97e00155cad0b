"""The forward of a decoder layer that goes as Llama's: for few tokens one call of the native library, which its linears name their weights for.

Given to layers by `fused_forwards`; where the whole decoder goes as Llama's, `fused_decoder` asks for them all at once. What the library does not take goes the
layer's own way, to the same bits.
"""

import copy
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata_runtime.kernels import native_attention, native_layer, native_rowwise
from strata_runtime.kernels.native_attention import Entries
from strata_runtime.kernels.native_calls import CHANGES
from strata_runtime.kernels.native_layer import Meetings, Norms, Step
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.strategies import Switch, SwitchedLayer
from strata_runtime.ranks.linears import SummedLinear
from strata_runtime.ranks.shared_memory import SharedMemory

Positions = tuple[Tensor, Tensor]  # cos and sin, [1, rows, head_width]


@dataclass(eq=False)
class FusedLayer:
    """`norms`, `linears`: modules, as `native_layer` names them, of linears with their name in the parent: what is there may be replaced between two steps.
    `summed`: those whose products ranks add up, of the attention's output and the MLP's; none: the layer is nobody else's.
    """

    attention: Any
    norms: tuple[Any, Any, Any, Any]
    linears: tuple[tuple[Any, str], ...]
    rule: AttentionRule
    work_columns: int
    summed: tuple[SummedLinear, ...] = ()
    _known: tuple[Norms, weakref.ref[Entries], bytes] | None = field(default=None, init=False)
    _named: dict[int, tuple[tuple[int, int], bytes]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, layer: Any, window: int | None) -> "FusedLayer | None":
        """`window`: of its attention. None: norms of several epsilons, or linears that the library does not know, as those whose sums go over a network."""
        attention, mlp = layer.self_attn, layer.mlp
        own = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *own)
        if len({each.variance_epsilon for each in norms if each is not None}) > 1:
            return None
        linears = (
            *((attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *((mlp, name) for name in ("gate_proj", "up_proj", "down_proj")),
        )
        outer = [getattr(parent, name) for parent, name in linears]
        summed = tuple(each for each in outer if isinstance(each, SummedLinear))
        if summed and summed != (attention.o_proj, mlp.down_proj):
            return None
        if not all(isinstance(each.collectives, SharedMemory) for each in summed):
            return None
        inner = [_inner(each) for each in outer]
        if not all(hasattr(each, "native_product") for each in inner):
            return None
        if not native_attention.takes(torch.bfloat16, torch.device("cpu"), attention.head_dim):
            return None
        queries, keys, _, width, gates, *_ = (each.out_features for each in inner)
        columns = native_layer.work_columns(width, queries, keys, gates)
        return cls(attention, norms, linears, AttentionRule(attention.scaling, window), columns, summed)

    def __deepcopy__(self, memo: dict[int, object]) -> "FusedLayer":
        """Of a layer with weights of its own, of which nothing is known yet."""
        fields = self.attention, self.norms, self.linears, self.rule, self.work_columns, self.summed
        return FusedLayer(*copy.deepcopy(fields, memo))

    @property
    def meetings(self) -> Meetings | None:
        """Of the ranks that share it, all layers of a stage alike."""
        if not self.summed:
            return None
        collectives = self.summed[0].collectives
        assert isinstance(collectives, SharedMemory)
        return collectives

    def forward(
        self,
        own: Callable[..., Tensor],
        hidden_states: Tensor,
        position_embeddings: Positions | None = None,
        **given: Any,
    ) -> Tensor:
        """hidden_states: [1, rows, width]; as the layer's own."""
        of_model = self.attention.strata_step
        named = self.named(of_model)
        step = None if named is None else self.step(of_model.batch, hidden_states, position_embeddings)
        if named is None or step is None:
            return own(hidden_states, position_embeddings=position_embeddings, **given)
        return native_layer.layers(hidden_states, step, named[1], of_model.begun, self.meetings)

    @classmethod
    def whose(cls, layer: Any) -> "FusedLayer | None":
        """That the forward of a layer is of, while ranks that share it run Megatron."""
        forward = vars(layer).get("forward")
        if isinstance(forward, SwitchedLayer):
            forward = forward.own
        fused = forward_of(forward)
        return fused if isinstance(fused, cls) else None

    @property
    def switch(self) -> Switch | None:
        """Of the strategy that the layers of its stage run; None: they know one alone."""
        found: Switch | None = self.attention.strata_step.switch
        return found

    def named(self, of_model: Any) -> tuple[Entries, bytes] | None:
        """Its part of the pool, and by what the library knows it in this step, as `native_layer.layers` takes it; None: it does not take all of it."""
        batch: Batch | None = of_model.batch
        if batch is None or batch.tokens > native_layer.MOST_TOKENS or any(each.instead for each in self.summed):
            return None
        number = self.attention.layer_idx
        entries, products = batch.layers[number].entries, self._products(batch.tokens)
        if entries is None or products is None:
            return None
        of_model.rules[number] = self.rule
        return entries, self._numbers(entries) + products

    def step(self, batch: Batch, hidden: Tensor, positions: Positions | None) -> Step | None:
        """Worked out by the first layer that asks; None: the library does not take it."""
        if (
            positions is None
            or hidden.dtype is not torch.bfloat16
            or not hidden.is_contiguous()
            or hidden.shape[0] != 1
        ):
            return None
        asked = id(positions), self.attention.head_dim  # the positions are kept with what is found
        known = batch.fused_steps.get(asked)
        if known is not None and (known[1] is None or known[1].memory.shape[1] >= self.work_columns):
            return known[1]
        made = (
            native_layer.step(*positions, batch.places, batch.native_spans, batch.page_tokens, self.work_columns)
            if self._takes(batch, hidden, positions)
            else None
        )
        batch.fused_steps[asked] = (positions, made)
        return made

    def _takes(self, batch: Batch, hidden: Tensor, positions: Positions) -> bool:
        width = self.attention.head_dim
        return (
            native_rowwise.takes(hidden)
            and batch.places.device.type == "cpu"
            and all(
                each.dtype is torch.bfloat16 and each.shape[-1] == width and each.is_contiguous() for each in positions
            )
        )

    def _products(self, tokens: int) -> bytes | None:
        """Of its linears as they are now; None: the library does not multiply by one of them. Kept until weights change: weights have driven out of the
        caches what Python looks at in between.
        """
        now, known = CHANGES.now, self._named.get(tokens)
        if known is None or known[0] != now:
            named = [_product(getattr(parent, name), tokens) for parent, name in self.linears]
            there = [each for each in named if each is not None]
            if len(there) < len(named):
                return None
            self._named[tokens] = known = now, b"".join(there)
        return known[1]

    def _numbers(self, entries: Entries) -> bytes:
        """Anew where a norm or the pool is another one."""
        weights = Norms(*(None if each is None else each._parameters["weight"] for each in self.norms))  # noqa: SLF001  a module's own look-up is slow
        known = self._known
        if known is not None and known[1]() is entries and all(map(operator.is_, known[0], weights)):
            return known[2]
        epsilon = self.norms[0].variance_epsilon
        numbers = native_layer.layer_numbers(weights, epsilon, entries, self.rule.scale, self.rule.window)
        self._known = weights, weakref.ref(entries), numbers  # a pool goes when it is let go
        return numbers


def forward_of(forward: Any) -> Any:
    """What the forward that a module was given is of; None: it has its own."""
    return getattr(forward.func, "__self__", None) if isinstance(forward, partial) else None


def _inner(linear: Any) -> Any:
    """What this rank has of a linear."""
    return linear.inner if isinstance(linear, SummedLinear) else linear


def _product(linear: Any, tokens: int) -> bytes | None:
    """None, too, where somebody looks at what goes in or comes out."""
    inner = _inner(linear)
    named: Callable[[int], bytes | None] | None = getattr(inner, "native_product", None)
    if named is None or any(each._forward_pre_hooks or each._forward_hooks for each in (linear, inner)):  # noqa: SLF001
        return None
    return named(tokens)
