"""Shadows: layers of others that a slot keeps in host memory, so that taking them over after a loss reads memory, not a disk or a hub.

Planned by `replan.shadows`, part of the Plan; `orders_of` cuts them out for slots, which read an order and never see the plan.
"""

from collections.abc import Iterable
from typing import Literal

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.values import Value


class Shadow(Value, frozen=True, omit_defaults=True):
    """What one slot keeps against the loss of one other node: what the repair of that loss has it read. `read_bytes`: all that it reads then, as predicted,
    as are all bytes here.
    """

    slot: str
    node: str  # of the slot
    against: str  # the node whose loss it is kept for
    layers: tuple[int, ...]  # ascending
    format: tuple[FormatName, ...]  # of each of them
    layer_bytes: tuple[int, ...]  # of each of them
    read_bytes: int
    room_bytes: int  # that the slot may take of host memory, for all that it keeps
    embedding_bytes: int = 0  # 0: it is not kept
    head_bytes: int = 0

    @property
    def embedding(self) -> bool:
        return self.embedding_bytes > 0

    @property
    def head(self) -> bool:
        return self.head_bytes > 0

    @property
    def size_bytes(self) -> int:
        """Of all that it keeps."""
        return sum(self.layer_bytes) + self.embedding_bytes + self.head_bytes

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


def kept_bytes(shadows: Iterable[Shadow]) -> dict[str, int]:
    """Slot -> host memory that its shadows take: what several losses have in common counts once."""
    found: dict[str, dict[tuple[int, str], int]] = {}
    for each in shadows:
        mine = found.setdefault(each.slot, {})
        mine.update(zip(each.parts.items(), each.layer_bytes, strict=True))
        mine.update({(-1, "embedding"): each.embedding_bytes} if each.embedding else {})
        mine.update({(-1, "head"): each.head_bytes} if each.head else {})
    return {slot: sum(parts.values()) for slot, parts in found.items()}


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
