"""Layers of a stage that several ranks share, given all strategies: their weights move to where every rank sees them.

Called once by `load_stage` for a role whose table names more than Megatron. What is behind the attention's heads is shared: its output projection and the
MLP. A layer that does not go as Llama's, or has a format that is not shared, or changes its bits later, runs Megatron on all ranks alike.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from strata_runtime.formats.draft_linear import target_of
from strata_runtime.loading.shared_linears import of_rank, placed, tensors_of
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.model.attention_interface import attention
from strata_runtime.model.divided import Place
from strata_runtime.model.fused_forwards import fuse
from strata_runtime.model.same_code import goes_as_llama
from strata_runtime.model.strategies import Parts, Switch, SwitchedLayer
from strata_runtime.ranks.cut import BY_INPUTS, kind_of
from strata_runtime.ranks.linears import SummedLinear
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.ranks.shared_weights import SharedWeights

log = logging.getLogger(__name__)
_OF_MLP = frozenset({"wide", "two wide", "narrow"})


def share_layers(stage: ModelSlice, layers: range, memory: SharedMemory) -> Switch:
    """Of the stage's layers those that can. The switch sets what all of them run."""
    weights, switch, shared = SharedWeights(memory), Switch(), []
    stage.step.switch = switch
    for number in layers:
        layer = stage.layer(number)
        found = _shared_places(layer, stage.places(number))
        if found is None:
            continue
        for key, (parent, name) in found.items():
            setattr(parent, name, placed(getattr(parent, name), weights, key))
        shared.append(number)
        parts = _LayerParts(layer, found, weights)
        layer.forward = SwitchedLayer(layer, layer.self_attn.o_proj, parts, switch, memory)  # type: ignore[union-attr,arg-type]
    weights.show()
    log.info("rank %d: %d of %d layers switch their strategy", memory.rank, len(shared), len(layers))
    return switch


def _shared_places(layer: Any, places: Mapping[str, Place]) -> dict[str, Place] | None:
    """Where the linears are that all ranks need; None: the layer cannot run anything but Megatron."""
    attended = getattr(getattr(layer, "self_attn", None), "o_proj", None)
    mlp = getattr(layer, "mlp", None)
    if not goes_as_llama(layer) or not isinstance(attended, SummedLinear) or not isinstance(mlp, nn.Module):
        return None
    own = {key: place for key, place in places.items() if kind_of(key) in _OF_MLP or place[0] is attended}
    inside = [parent for key, (parent, _) in own.items() if kind_of(key) in _OF_MLP]
    direct = {id(mlp), *(id(child) for child in mlp.children() if isinstance(child, SummedLinear))}
    if not inside or any(id(parent) not in direct for parent in inside) or _has_more(mlp, len(inside)):
        return None
    if any(tensors_of(getattr(parent, name)) is None for parent, name in own.values()):
        return None
    return own


def _has_more(mlp: nn.Module, linears: int) -> bool:
    """Whether an MLP has weights beside its linears, as layers of experts do."""
    held = [child for child in mlp.children() if next(child.parameters(), next(child.buffers(), None)) is not None]
    blocked = [child for child in mlp.children() if tensors_of(getattr(child, "inner", child)) is not None]
    return (
        len(blocked) != linears
        or any(child not in blocked for child in held)
        or bool(list(mlp.parameters(recurse=False)))
    )


class _LayerParts:
    """The parts of all ranks, as long as this rank's own are those that the others see: bits change on all ranks between the same two steps."""

    def __init__(self, layer: Any, places: Mapping[str, Place], weights: SharedWeights) -> None:
        self._mlp: nn.Module = layer.mlp
        self._places, self._weights = dict(places), weights
        self._placed = {key: getattr(parent, name) for key, (parent, name) in places.items()}
        self._parts: Parts | None = None

    def __call__(self) -> Parts | None:
        if any(
            target_of(getattr(parent, name)) is not self._placed.get(key)
            for key, (parent, name) in self._places.items()
        ):
            self._forget()
            return None
        if self._parts is None:
            self._parts = self._linked()
        return self._parts

    def _forget(self) -> None:
        for key in self._placed:
            self._weights.forget(key)
        self._placed, self._parts = {}, None

    def _linked(self) -> Parts | None:
        self._weights.see_all()
        ranks = [self._of_rank(rank) for rank in range(self._weights.ranks)]
        found = [each for each in ranks if each is not None]
        if len(found) < len(ranks):
            return None
        return Parts([projection for projection, _ in found], [mlp for _, mlp in found])

    def _of_rank(self, rank: int) -> tuple[nn.Module, nn.Module] | None:
        projection, linears = None, dict[str, nn.Module]()
        for key in self._placed:
            linear = of_rank(self._weights, rank, key)
            if linear is None:
                return None
            if kind_of(key) not in _OF_MLP:
                projection = linear
            else:
                linears[key.rpartition(".")[2]] = linear
        assert projection is not None
        mlp = copy.copy(self._mlp)
        mlp._modules = {**self._mlp._modules, **linears}  # noqa: SLF001, a copy that shares all but its linears
        if vars(mlp).pop("forward", None) is not None:  # that of the one it is a copy of
            fuse(mlp, attention)
        return projection, mlp


assert {"narrow", "attended"} == BY_INPUTS
