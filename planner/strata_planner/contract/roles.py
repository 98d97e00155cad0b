"""Roles: what a plan gives each slot to do. A slot holds a list of roles and gets them only by `prepare`.

`roles_of` cuts a plan into roles; it is called by whoever makes epochs. Slots read roles and never see the plan.
"""

from typing import Self

import msgspec

from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.plan import NO_SPECULATION, DeviceRef, MicroBatch, Plan, Replica, Speculation, Stage
from strata_planner.contract.sequence_state import keeps_state
from strata_planner.contract.shares import Shares
from strata_planner.contract.strategies import StrategyTable
from strata_planner.contract.values import Value


class Neighbour(Value, frozen=True):
    """A role of another (or the same) slot: its slot's name and the place of the role in that slot's list."""

    slot: str
    role: int


class Role(Value, frozen=True, omit_defaults=True):
    """One stage of one replica as its slot must run it. A field at its default is left out, for slots of an earlier release."""

    replica: int
    stage: int
    stages: int  # stages of this replica
    devices: tuple[DeviceRef, ...]
    tensor_parallel: int
    leader: bool
    layers: tuple[int, int]  # first and last, inclusive
    bits: tuple[int, ...]
    format: tuple[FormatName, ...]
    kv_bits: int
    kv_page_budget: int  # pages of this slot
    replica_page_budget: int  # pages of the replica's smallest stage: what the leader may admit
    page_tokens: int
    embedding: bool
    head: bool
    model_uri: str
    compute_type: ComputeType
    max_model_len: int
    micro_batch: MicroBatch
    predicted_bytes: int  # what the plan expects this role to take of each of its devices, or of the first one where `rank_bytes` tells each one's
    next: Neighbour  # the last stage's next is stage 0: sampled tokens go back to the leader
    previous: Neighbour
    prefix_caching: bool = True
    speculation: Speculation = NO_SPECULATION
    drafts: bool = False  # some layer of the replica has weights of fewer bits to draft with
    state_slots: int = (
        0  # sequences that may run at once, since each keeps state beside its KV; 0: this model's keep none
    )
    head_format: FormatName = "dense"  # of the table that logits are made with, where the role has the head
    strategies: StrategyTable = ()  # of a prefill step, by its tokens; empty: Megatron alone
    boundary_log_pages: int = 0  # of which what the stage hands on is kept in host memory
    shares: Shares = ()  # how much of each layer each device has, in proportion; none: equal parts
    rank_bytes: tuple[int, ...] = ()  # predicted, of each device; none: all alike

    @property
    def logged_pages(self) -> int:
        """Pages, the first ones, of which the stage keeps what it hands on."""
        keeps = not self.head and self.tensor_parallel == 1
        return min(self.boundary_log_pages, self.kv_page_budget) if keeps else 0

    @property
    def total_bytes(self) -> int:
        """Predicted, of all its devices."""
        return sum(self.rank_bytes) if self.rank_bytes else self.predicted_bytes * self.tensor_parallel

    def room_of(self, rank: int) -> tuple[int, int]:
        """Bytes that it is expected to take of the device of a rank, and what that has."""
        if self.rank_bytes:
            return self.rank_bytes[rank], self.devices[rank].usable_bytes
        return self.predicted_bytes, min(device.usable_bytes for device in self.devices)

    def grown(self, rank: int, more_bytes: int) -> Self:
        """Once it takes so much more on the device of a rank, and on the others in proportion."""
        own = self.shares[rank] if self.rank_bytes else 1
        each = tuple(
            size + more_bytes * share // own
            for size, share in zip(self.rank_bytes, self.shares, strict=bool(self.rank_bytes))
        )
        first = each[0] if each else self.predicted_bytes + more_bytes
        return msgspec.structs.replace(self, predicted_bytes=first, rank_bytes=each)

    @property
    def watched(self) -> tuple[int, ...]:
        """Those of its layers whose outputs go on to a head at the leader."""
        first, last = self.layers
        return tuple(layer for layer in self.speculation.fused if first <= layer <= last)

    @property
    def states_received(self) -> int:
        """Hidden states of each token that come in for the head: of the layers before, beside those that it computes on; of all, with results."""
        fused = self.speculation.fused if self.stages > 1 else ()
        return len(fused) if self.leader else sum(layer < self.layers[0] for layer in fused)


def roles_of(plan: Plan) -> dict[str, tuple[Role, ...]]:
    """Slot name -> its roles, in the order of replicas and stages."""
    place = _places(plan)
    roles: dict[str, list[Role]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            roles.setdefault(stage.slot, []).append(_role(plan, replica, stage, place))
    return {slot: tuple(listed) for slot, listed in roles.items()}


def _places(plan: Plan) -> dict[tuple[int, int], Neighbour]:
    """(replica, stage) -> where that role lies."""
    counts: dict[str, int] = {}
    places = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            index = counts.get(stage.slot, 0)
            counts[stage.slot] = index + 1
            places[replica.replica, stage.stage] = Neighbour(slot=stage.slot, role=index)
    return places


def _role(plan: Plan, replica: Replica, stage: Stage, place: dict[tuple[int, int], Neighbour]) -> Role:
    count = len(replica.stages)
    return Role(
        replica=replica.replica,
        stage=stage.stage,
        stages=count,
        devices=stage.devices,
        tensor_parallel=stage.tensor_parallel,
        leader=stage.leader,
        layers=stage.layers,
        bits=stage.bits,
        format=stage.format,
        kv_bits=stage.kv_bits,
        kv_page_budget=stage.kv_page_budget,
        replica_page_budget=min(other.kv_page_budget for other in replica.stages),
        page_tokens=plan.page_tokens,
        embedding=stage.embedding,
        head=stage.head,
        model_uri=plan.model_uri,
        compute_type=plan.compute_type,
        max_model_len=plan.max_model_len,
        micro_batch=replica.micro_batch,
        predicted_bytes=stage.memories[0].total_bytes,
        next=place[replica.replica, (stage.stage + 1) % count],
        previous=place[replica.replica, (stage.stage - 1) % count],
        prefix_caching=plan.prefix_caching,
        speculation=plan.speculation,
        drafts=any(has_draft(name, plan.speculation) for other in replica.stages for name in other.format),
        state_slots=replica.concurrency if keeps_state(plan.architecture) else 0,
        head_format=plan.head_format if stage.head else "dense",
        strategies=stage.strategies,
        boundary_log_pages=plan.boundary_log_pages,
        shares=stage.shares,
        rank_bytes=tuple(each.total_bytes for each in stage.rank_memory),
    )
