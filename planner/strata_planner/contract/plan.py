"""The Plan: which layers run on which device, at which precision, with which micro-batches, and what that should give.

Made by the planner, stored by the operator (one immutable ConfigMap per epoch), cut into roles for the slots. Frozen and
versioned; the JSON schema is published by `plan_schema`. Knows nothing of how it was found or how it is run.
"""

from inspect import cleandoc
from typing import Any, Literal, Self

import msgspec

from strata_planner.contract.forecast import ArrivalForecast, SpeculationForecast
from strata_planner.contract.formats import BITS_OF_FORMAT, ComputeType, FormatName
from strata_planner.contract.judged import SearchEnded, Stated
from strata_planner.contract.shadows import Shadow, ShadowOrder, orders_of
from strata_planner.contract.shares import Shares, problem_of
from strata_planner.contract.steps import DRAFT_ROWS, FEWEST_PROMPTS
from strata_planner.contract.strategies import StrategyTable
from strata_planner.contract.values import ContractError, Value, from_json, to_json

PLAN_VERSION = 2

Place = tuple[str, str, int]  # node, type and index of a device: what no other device has, and what outlasts a plan


class DeviceRef(Value, frozen=True, omit_defaults=True):
    """One device of a slot. `index` counts the devices of this type on the node, from 0. `threads`: that a processor computes with, 0: those of its slot."""

    type: str
    index: int
    usable_bytes: int
    threads: int = 0


class StageMemory(Value, frozen=True, omit_defaults=True):
    """Predicted bytes of one stage on each of its devices. `total_bytes` <= the device's usable bytes: both without the overhead."""

    weights_bytes: int
    embedding_bytes: int  # embedding tables, final norm and head, where they sit on this stage
    kv_bytes: int  # keys and values, and what sequences keep in layers without them
    temporary_bytes: int
    overhead_bytes: int  # the framework: context, libraries; what an idle slot holds too
    total_bytes: int
    # What drafts, where this stage leads: weights and what its steps take; its KV is in `kv_bytes`. Of several stages: hidden states on their way to a head.
    draft_bytes: int = 0


class StageTimes(Value, frozen=True):
    """Predicted seconds of one step on one stage and of handing it to the next: `prefill` where it carries prompts beside a full micro-batch
    of decoding sequences, `decode` where it carries none.
    """

    prefill_seconds: float
    decode_seconds: float
    prefill_transfer_seconds: float
    decode_transfer_seconds: float
    source: str  # "roofline", "measured", a profile's name


class Stage(Value, frozen=True, omit_defaults=True):
    """One stage of a pipeline: consecutive layers on the devices of one slot. `shares`: how much of each layer each device has, in proportion; none:
    equal parts. `memory`: of each device, or of the first one where `rank_memory` tells each device's own.
    """

    stage: int
    slot: str
    node: str
    devices: tuple[DeviceRef, ...]
    tensor_parallel: int
    leader: bool  # this stage schedules the replica (stage 0)
    layers: tuple[int, int]  # first and last, inclusive
    bits: tuple[int, ...]  # per layer
    format: tuple[FormatName, ...]  # per layer
    kv_bits: int
    kv_page_budget: int  # pages of `Plan.page_tokens` tokens; the same number of tokens for every layer of the stage
    embedding: bool
    head: bool
    memory: StageMemory
    times: StageTimes
    strategies: StrategyTable = ()  # by the tokens of a prefill step, of a stage of several devices; empty: Megatron alone
    shares: Shares = ()
    rank_memory: tuple[StageMemory, ...] = ()

    @property
    def memories(self) -> tuple[StageMemory, ...]:
        """Of each of its devices."""
        return self.rank_memory or (self.memory,) * self.tensor_parallel

    @property
    def total_bytes(self) -> int:
        """Predicted, of all its devices."""
        return sum(each.total_bytes for each in self.memories)

    @property
    def fullest(self) -> tuple[StageMemory, DeviceRef]:
        """Of its devices the one with least room left, in proportion."""
        pairs = zip(self.memories, self.devices, strict=True)
        return max(pairs, key=lambda pair: pair[0].total_bytes / max(1, pair[1].usable_bytes))

    @property
    def places(self) -> tuple[Place, ...]:
        """Of its devices, in their order."""
        return tuple((self.node, device.type, device.index) for device in self.devices)


def steps_under_way(count: int, stages: int) -> int:
    """At most: one for each stage, or `count` where that is above 0 and fewer."""
    return min(count or stages, stages)


class MicroBatch(Value, frozen=True, omit_defaults=True):
    """Sequences per micro-batch in the two phases (LLM-PQ's eta and xi) and the most tokens one step may carry. `count`: micro-batches that
    are under way at most, 0: one per stage; fewer and larger ones read the weights of unlike stages less often. `prompts_per_token`: tokens of prompts
    that the workload brings for each token of an answer; with as many beside each that decodes, none waits longer and longer. `least_prompt_tokens`:
    of prompts in a step beside streams, if there are as many. Few tokens read nearly all experts of a layer: of fewer than these each would take more
    than twice as long as in a whole chunk.
    """

    prefill: int
    decode: int
    max_step_tokens: int
    count: int = 0
    prompts_per_token: float = 0.0
    least_prompt_tokens: int = 0

    def most_prompts(self, rows: int = 0) -> int:
        """That one step computes chunks of, beside so many rows that decode: short ones may fill a micro-batch's rows."""
        return max(self.prefill, FEWEST_PROMPTS, self.decode - rows)

    @property
    def most_sampled(self) -> int:
        """Rows of a step of which logits may be wanted: of sequences, of drafted tokens, or of a prompt's own. Stages have room for so many."""
        return min(max(self.decode, DRAFT_ROWS), self.max_step_tokens)

    def under_way(self, stages: int) -> int:
        """Of a pipeline of so many stages."""
        return steps_under_way(self.count, stages)


SpeculationMode = Literal["none", "auto", "ngram", "suffix", "selfPrecision", "draft", "eagle"]


class Speculation(Value, frozen=True, omit_defaults=True):
    """Tokens that are guessed and verified in one step: from the request's own text (`ngram`), from recent answers too (`suffix`), drafted by the
    model's own weights at `draft_bits` (`selfPrecision`) or beside the leader by a small model of the same tokens (`draft`) or by a head that reads
    hidden states of the model (`eagle`), or the best of the others where it pays (`auto`). `tokens`: of one verification, at most. `draft_uri`: the small
    model or the head, empty: none; `auto` takes it in place of fewer bits. `fused`: the layers whose outputs the head reads, each once, ascending;
    empty: nothing reads any.
    """

    mode: SpeculationMode = "none"
    tokens: int = 4
    draft_bits: int = 4
    draft_uri: str = ""
    fused: tuple[int, ...] = ()

    @property
    def has_head(self) -> bool:
        """Whether what drafts is a head."""
        return self.mode == "eagle" or bool(self.fused)


NO_SPECULATION = Speculation()


class Replica(Value, frozen=True):
    """One pipeline. `concurrency`: the sequences in flight that it was planned for, its share of the workload's."""

    replica: int
    stages: tuple[Stage, ...]
    micro_batch: MicroBatch
    concurrency: int

    @property
    def decode_rate(self) -> float:
        """Tokens a second of full decode micro-batches through the slowest stage or hop: the replica's weight in routing.

        1 where the plan has no times.
        """
        slowest = max(max(each.times.decode_seconds, each.times.decode_transfer_seconds) for each in self.stages)
        return self.micro_batch.decode / slowest if slowest else 1.0


class Prediction(Value, frozen=True, omit_defaults=True):
    """What the whole plan should give for the workload it was made for, while as many requests as its replicas' `concurrency` are in
    flight and each is followed by the next as soon as it has its answer. Without speculation: what that brings is told apart, and what users see where
    requests come at random.
    """

    tokens_per_second: float
    ttft_ms: float
    tpot_ms: float
    latency_seconds: float  # LLM-PQ's latency objective: the whole batch, both phases
    quality_penalty: float  # sum of the sensitivity indicator over layers, before theta
    sensitivity_source: str
    bound_by: str
    perplexity_increase: float | None = None  # points of perplexity over 16 bits; None: no losses were measured
    speculation: SpeculationForecast | None = None  # None: not asked for, or nobody worked it out
    arrivals: ArrivalForecast | None = None  # None: nobody worked it out


class Alternative(Value, frozen=True):
    """A plan that was not chosen. `prediction` and `objective` None: nothing fits that way."""

    summary: str
    prediction: Prediction | None
    objective: float | None  # by the question's metric, more is better: seconds and costs are below 0
    rejected_because: str
    value: float | None = None  # the same in the unit of the plan's `objective`


class UnusedDevices(Value, frozen=True):
    """`count` equal devices on these nodes that the plan leaves idle, and why."""

    type: str
    nodes: tuple[str, ...]
    count: int
    reason: str


class StandingOrder(Value, frozen=True, omit_defaults=True):
    """The repair that slots and gateways carry out by themselves when exactly these slots are lost while nobody controls them: their replicas as they
    are then, made of slots that run already. `kept_share`: of the plan's value, by the request's metric.
    """

    lost: tuple[str, ...]  # slots
    replicas: tuple[Replica, ...]  # formed anew, without them
    prediction: Prediction  # of the whole plan then
    kind: str  # of the repair
    layers_moved: int
    bits_lowered: int  # layers
    loaded_bytes: int
    kept_share: float
    left_out: tuple[int, ...] = ()  # replicas that end with them
    shadows: tuple[Shadow, ...] = ()  # that are still of use


class Plan(Value, frozen=True):
    """The plan in force for one deployment in one epoch. `decode` checks what a schema cannot say."""

    version: int
    model_uri: str
    architecture: str
    num_layers: int
    compute_type: ComputeType
    max_model_len: int
    page_tokens: int
    replicas: tuple[Replica, ...]
    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()
    unused: tuple[UnusedDevices, ...] = ()
    objective: Stated | None = None  # None: nobody compared it, or a release that did not say
    search: SearchEnded | None = None  # None: no search found it, as a repair
    prefix_caching: bool = True  # KV of equal prefixes is computed once and shared
    boundary_log_pages: int = 0  # of which stages keep what they hand on, in host memory
    speculation: Speculation = NO_SPECULATION
    head_format: FormatName = "dense"  # of the table that logits are made with
    shadows: tuple[Shadow, ...] = ()  # what slots keep in host memory of layers that they would take over
    orders: tuple[StandingOrder, ...] | None = (
        None  # what is done about losses while nobody controls the deployment; None: nothing
    )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of all replicas."""
        return tuple(stage for replica in self.replicas for stage in replica.stages)

    @property
    def places(self) -> frozenset[Place]:
        """Of all devices that it uses."""
        return frozenset(place for stage in self.stages for place in stage.places)

    @property
    def shadow_orders(self) -> dict[str, ShadowOrder]:
        """Slot name -> what it is to keep; no slot that keeps nothing."""
        return orders_of(self.shadows, self.model_uri, self.compute_type)

    def after(self, order: StandingOrder) -> "Plan":
        """Once one of its standing orders has been carried out. What was said of the search, and what else would stand then, is of another plan."""
        changed = {each.replica: each for each in order.replicas}
        return msgspec.structs.replace(
            self,
            replicas=tuple(
                changed.get(each.replica, each) for each in self.replicas if each.replica not in order.left_out
            ),
            prediction=order.prediction,
            shadows=order.shadows,
            alternatives=(),
            unused=(),
            search=None,
            orders=None,
        )

    def encode(self) -> bytes:
        return to_json(self)

    @classmethod
    def decode(cls, data: bytes | str) -> Self:
        """Raises ContractError for malformed JSON, another version or an inconsistent plan."""
        plan = from_json(data, cls)
        plan.check()
        return plan

    def check(self) -> None:
        """The laws of a plan: every layer once and in order, lists as long as their layers. Raises ContractError."""
        if self.version != PLAN_VERSION:
            raise ContractError(f"plan version {self.version}; this release reads version {PLAN_VERSION}: plan again")
        fused = self.speculation.fused
        if fused != tuple(sorted(set(fused))) or not all(0 <= layer < self.num_layers for layer in fused):
            raise ContractError(
                f"a head that drafts reads the layers {list(fused)}: each once, ascending, of 0..{self.num_layers - 1}; plan again"
            )
        for replica in self.replicas:
            _check_replica(replica, self.num_layers)
        nodes = {stage.slot: stage.node for stage in self.stages}
        for shadow in self.shadows:
            _check_shadow(shadow, nodes.get(shadow.slot), self.num_layers)
        for order in self.orders or ():
            _check_order(self, order)


def _check_replica(replica: Replica, num_layers: int) -> None:
    expected = 0
    for position, stage in enumerate(replica.stages):
        where = f"replica {replica.replica} stage {stage.stage}"
        first, last = stage.layers
        if stage.stage != position or first != expected or last < first:
            raise ContractError(
                f"{where}: layers {first}..{last} where stage {position} must start at layer {expected}"
            )
        count = last - first + 1
        if len(stage.bits) != count or len(stage.format) != count:
            raise ContractError(f"{where}: {len(stage.bits)} bits and {len(stage.format)} formats for {count} layers")
        if any(BITS_OF_FORMAT[name] != bits for name, bits in zip(stage.format, stage.bits, strict=True)):
            raise ContractError(f"{where}: formats {stage.format} do not have the bits {stage.bits}")
        starts = [tokens for tokens, _ in stage.strategies]
        if starts != sorted(set(starts)) or starts[:1] not in ([], [1]):
            raise ContractError(f"{where}: strategies from {starts} tokens on: ascending, the first from 1; plan again")
        if problem := problem_of(stage.shares, stage.tensor_parallel):
            raise ContractError(f"{where}: {problem}; plan again")
        if stage.rank_memory and (len(stage.rank_memory) != stage.tensor_parallel or not stage.shares):
            raise ContractError(
                f"{where}: memory of {len(stage.rank_memory)} devices where {stage.tensor_parallel} have unlike shares; plan again"
            )
        expected = last + 1
    if expected != num_layers:
        raise ContractError(f"replica {replica.replica}: {expected} layers are placed; the model has {num_layers}")


def _check_order(plan: Plan, order: StandingOrder) -> None:
    """It makes do with slots that run, and leaves replicas that lose nothing as they are."""
    where = f"standing order for the loss of {', '.join(order.lost)}"
    slots = {stage.slot for stage in plan.stages}
    losing = {each.replica for each in plan.replicas if {stage.slot for stage in each.stages} & {*order.lost}}
    if not order.lost or not {*order.lost} <= slots:
        raise ContractError(f"{where}: it has to name slots of the plan; plan again")
    if {each.replica for each in order.replicas} | {*order.left_out} != losing or len(order.left_out) == len(
        plan.replicas
    ):
        raise ContractError(f"{where}: it has to change the replicas that lose a slot, and no others; plan again")
    after = plan.after(order)
    if not {stage.slot for stage in after.stages} <= slots - {*order.lost}:
        raise ContractError(f"{where}: it takes slots that are lost or not in the plan; plan again")
    after.check()


def _check_shadow(shadow: Shadow, node: str | None, num_layers: int) -> None:
    """`node`: of the slot, None where the plan has none of that name."""
    where = f"shadow on {shadow.slot} against the loss of {shadow.against}"
    if node != shadow.node or shadow.against == node:
        raise ContractError(f"{where}: it has to lie on a slot of the plan, on another node; plan again")
    ordered = tuple(sorted(set(shadow.layers)))
    if shadow.layers != ordered or not all(0 <= layer < num_layers for layer in ordered):
        raise ContractError(f"{where}: layers {list(shadow.layers)}: each once, ascending, of 0..{num_layers - 1}")
    if not len(shadow.format) == len(shadow.layer_bytes) == len(ordered):
        raise ContractError(
            f"{where}: {len(shadow.format)} formats and {len(shadow.layer_bytes)} sizes for {len(ordered)} layers"
        )


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a Plan, as published in docs/plan.schema.json. From docstrings, which not all releases of msgspec free of indents."""
    schema = msgspec.json.schema(Plan)
    for each in schema["$defs"].values():
        if "description" in each:
            each["description"] = cleandoc(each["description"])
    return schema
