"""Shadows: layers of others that a slot keeps in host memory, so that taking them over after a loss reads memory, not a disk or a hub.

Planned by `replan.shadows`, part of the Plan; `orders_of` cuts them out for slots, which read an order and never see the plan.
"""

from collections.abc import Iterable
from typing import Literal

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.values import Value


class Shadow(Value, frozen=True, omit_defaults=True):
    """What one slot keeps against the loss of one other node: what the repair of that loss has it read. `read_bytes`: all that it reads then,
    `size_bytes`: of that what it keeps, both as predicted.
    """

    slot: str
    node: str  # of the slot
    against: str  # the node whose loss it is kept for
    layers: tuple[int, ...]  # ascending
    format: tuple[FormatName, ...]  # of each of them
    size_bytes: int
    read_bytes: int
    room_bytes: int  # that the slot may take of host memory, for all that it keeps
    embedding: bool = False
    head: bool = False

    @property
    def parts(self) -> dict[int, FormatName]:
        return dict(zip(self.layers, self.format, strict=True))


class ShadowOrder(Value, frozen=True, omit_defaults=True):
    """What one slot is to keep, of all losses. `most_bytes`: that it may take of host memory."""

    model_uri: str
    compute_type: ComputeType
    layers: tuple[int, ...]  # ascending
    formats: tuple[tuple[FormatName, ...], ...]  # of each layer, those that a takeover may read it in
    most_bytes: int
    embedding: bool = False
    head: bool = False


ShadowPhase = Literal["reading", "held", "failed"]


class ShadowState(Value, frozen=True):
    """How far a slot is with its order. `held`: all of it that there is room for."""

    phase: ShadowPhase
    held_bytes: int
    layers: int  # that are whole
    reason: str = ""  # why there is not more


def orders_of(shadows: Iterable[Shadow], model_uri: str, compute_type: ComputeType) -> dict[str, ShadowOrder]:
    """Slot name -> what it is to keep."""
    kept: dict[str, list[Shadow]] = {}
    for each in shadows:
        kept.setdefault(each.slot, []).append(each)
    return {slot: _order(listed, model_uri, compute_type) for slot, listed in kept.items()}


def _order(shadows: list[Shadow], model_uri: str, compute_type: ComputeType) -> ShadowOrder:
    formats: dict[int, set[FormatName]] = {}
    for each in shadows:
        for layer, name in each.parts.items():
            formats.setdefault(layer, set()).add(name)
    layers = tuple(sorted(formats))
    return ShadowOrder(
        model_uri=model_uri,
        compute_type=compute_type,
        layers=layers,
        formats=tuple(tuple(sorted(formats[layer])) for layer in layers),
        most_bytes=min(each.room_bytes for each in shadows),
        embedding=any(each.embedding for each in shadows),
        head=any(each.head for each in shadows),
    )
