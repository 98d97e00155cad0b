"""Strategies of a layer that several ranks share (DynPart, EECS-2024-108), put around a decoder layer from outside: it knows nothing of them.

Megatron is what the layer does by itself, with its cut linears (`divided`). The others multiply some rows by the parts of all ranks, which lie in memory that
all see (`ranks.shared_weights`). What ranks compute of a product is rounded each for itself and added up in the order of ranks whichever strategy runs, so that
where a kernel's sums do not depend on the number of rows, neither does any bit of the outputs on the strategy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strata_planner.contract.strategies import StrategyName
from strata_runtime.ranks.collectives import RowCollectives
from strata_runtime.ranks.cut import share
from strata_runtime.ranks.linears import SummedLinear
from strata_runtime.ranks.shared_memory import added


@dataclass
class Switch:
    """What all layers of a stage run; set between two steps."""

    strategy: StrategyName = "megatron"


@dataclass(frozen=True)
class Parts:
    """Of one layer, from each rank: the attention's output projection, and the MLP, both without a sum."""

    projections: Sequence[nn.Module]
    mlps: Sequence[nn.Module]


PartsNow = Callable[[], Parts | None]  # None: a layer whose weights are not those that ranks see any more


class SwitchedLayer:
    """The forward of a decoder layer for which `goes_as_llama`. `attended`: the sum of its attention's output projection."""

    def __init__(
        self, layer: Any, attended: SummedLinear, parts: PartsNow, switch: Switch, collectives: RowCollectives
    ) -> None:
        self._layer, self._attended, self.parts_now = layer, attended, parts
        self._switch, self._collectives = switch, collectives
        self.own: Callable[..., Tensor] = layer.forward  # Megatron

    def __call__(self, hidden_states: Tensor, **given: Any) -> Tensor:
        strategy = self._switch.strategy
        if strategy == "megatron" or hidden_states.shape[1] < self._collectives.ranks:
            return self.own(hidden_states, **given)
        parts = self.parts_now()
        if parts is None:
            return self.own(hidden_states, **given)
        if strategy == "projection-replicated":
            with self._attending(partial(self._of_all_heads, parts)):
                return self.own(hidden_states, **given)
        with self._attending(self._scattered):
            return self._by_rows(parts, hidden_states, given)

    @contextmanager
    def _attending(self, instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
        self._attended.instead = instead
        try:
            yield
        finally:
            self._attended.instead = None

    def _by_rows(self, parts: Parts, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """[1, rows, N] -> the same, where this rank goes on with its share of the rows behind the attention."""
        rows = hidden.shape[1]
        first, last = share(rows, self._collectives.ranks, self._collectives.rank)
        attended, _ = self._layer.self_attn(hidden_states=self._layer.input_layernorm(hidden), **given)
        own = hidden[:, first:last] + attended
        normed = self._layer.post_attention_layernorm(own)
        own += added([mlp(normed) for mlp in parts.mlps])
        return self._collectives.gather_rows(own[0], rows)[None]

    def _scattered(self, heads: Tensor) -> Tensor:
        """[1, rows, own K] -> [1, own rows, N]."""
        partial_sums: Tensor = self._attended.inner(heads)
        return self._collectives.reduce_scatter(partial_sums[0])[None]

    def _of_all_heads(self, parts: Parts, heads: Tensor) -> Tensor:
        """[1, rows, own K] -> [1, rows, N]."""
        widths = [int(each.in_features) for each in parts.projections]  # type: ignore[arg-type]
        columns = torch.split(self._collectives.gather(heads[0].contiguous(), tuple(widths))[None], widths, dim=-1)
        return added([each(own) for each, own in zip(parts.projections, columns, strict=True)])
