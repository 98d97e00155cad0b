"""A replica as the simulator runs it: stages with seconds and hops, and the limits that its leader schedules within.

Made from a Plan (`fleet`, `ReplicaModel.from_plan`), or by hand with any callables for seconds (tables of other systems).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Self

from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import MicroBatch, Plan, Replica, Stage
from strata_planner.contract.sequence_state import keeps_state
from strata_planner.costs.latency import Latencies
from strata_planner.errors import ClusterError
from strata_planner.question.cluster import Cluster, DeviceGroup
from strata_planner.question.model import LayerShape, Model
from strata_planner.simulate.pricing import StagePricer
from strata_planner.simulate.stage import Hop, StageModel


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan allows a replica. `page_budget`: of its smallest stage. `state_slots`: sequences that run at once, 0: as many as have blocks."""

    micro_batch: MicroBatch
    page_tokens: int
    page_budget: int
    max_model_len: int
    state_slots: int = 0

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def most_tokens(self) -> int:
        """Prompt plus answer of the longest request that can ever run."""
        return min(self.max_model_len, self.page_budget * self.page_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """`tokens_per_second`: the weight that the coordinator routes by."""

    stages: tuple[StageModel, ...]
    limits: Limits
    tokens_per_second: float = 1.0

    @classmethod
    def from_plan(cls, plan: Plan, replica: Replica, model: Model, cluster: Cluster, latencies: Latencies) -> Self:
        """Raises ClusterError for a device that the cluster lacks. Use `fleet` for all replicas: it prices layers once."""
        return cls.priced(plan, replica, StagePricer(model, cluster, plan.compute_type, latencies))

    @classmethod
    def priced(cls, plan: Plan, replica: Replica, pricer: StagePricer) -> Self:
        groups = [_group(stage, pricer.cluster) for stage in replica.stages]

        def hop(place: int) -> Hop:
            source, target = groups[place].leader, groups[(place + 1) % len(groups)].leader
            states = sum(layer <= replica.stages[place].layers[1] for layer in plan.speculation.fused)
            return pricer.hop(source, target, sampled=place == len(groups) - 1, states=states)

        stages = tuple(
            StageModel(
                pricer.stage(_layers(stage, pricer.model), group, kv_bits=stage.kv_bits, head=stage.head), hop(place)
            )
            for place, (stage, group) in enumerate(zip(replica.stages, groups, strict=True))
        )
        budget = min(stage.kv_page_budget for stage in replica.stages)
        slots = replica.concurrency if keeps_state(plan.architecture) else 0
        limits = Limits(replica.micro_batch, plan.page_tokens, budget, plan.max_model_len, slots)
        return cls(stages, limits, replica.decode_rate)


def fleet(plan: Plan, model: Model, cluster: Cluster, latencies: Latencies) -> tuple[ReplicaModel, ...]:
    """All replicas of a plan. Raises ClusterError for a device that the cluster lacks."""
    pricer = StagePricer(model, cluster, plan.compute_type, latencies)
    return tuple(ReplicaModel.priced(plan, replica, pricer) for replica in plan.replicas)


def _layers(stage: Stage, model: Model) -> Counter[tuple[LayerShape, FormatName]]:
    first, last = stage.layers
    return Counter(zip(model.layers[first : last + 1], stage.format, strict=True))


def _group(stage: Stage, cluster: Cluster) -> DeviceGroup:
    group = cluster.group(stage.places, stage.shares)
    if group is None:
        device = next(
            each for place, each in zip(stage.places, stage.devices, strict=True) if not cluster.group((place,))
        )
        raise ClusterError(
            f"stage {stage.stage} runs on device {device.index} of type '{device.type}' of node '{stage.node}', which the "
            "cluster does not have: simulate a plan with the cluster it was made for"
        )
    return group
