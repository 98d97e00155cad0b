"""One deployment, served by the real controller on the model of a cluster: what named cases are told with."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from strata_operator.api import Condition, LLMDeploymentStatus
from strata_planner.contract.control import Took
from tests.operator.cluster_model import Kubernetes, status_of
from tests.operator.virtual_operator import ApiFaults, ModelControl, Planned, PretendedPlanner, VirtualOperator


class World:
    """One deployment, `chat`, on four nodes of two GPUs; it takes the first two by name."""

    def __init__(self, *nodes: str) -> None:
        self.cluster = Kubernetes(*nodes or ("a", "b", "c", "d"))
        self.cluster.serve("chat")
        self.api = ApiFaults()
        self.planner = PretendedPlanner(self.cluster)
        self.operator = self._a_new_operator()

    def _a_new_operator(self) -> VirtualOperator:
        return VirtualOperator(self.cluster, self.api, ModelControl(self.cluster), self.planner)

    def operator_starts_anew(self) -> None:
        self.operator.close()
        self.operator = self._a_new_operator()

    def close(self) -> None:
        self.operator.close()
        self.cluster.time.close()

    @property
    def status(self) -> LLMDeploymentStatus:
        return status_of(self.cluster, "chat")

    @property
    def plans(self) -> list[Planned]:
        return self.planner.plans

    def look(self) -> bool:
        """Once; whether there is something still to do."""
        return self.operator.look()

    def passes(self, seconds: float = 0, *, every: float = 5) -> None:
        """Time, with a look every few seconds; then until there is nothing more to do."""
        end = self.cluster.now() + timedelta(seconds=seconds)
        while self.cluster.now() < end:
            self.looks(1, every=every)
        for _ in range(40):
            if not self.look() and not self.look():  # a plan that failed is said at the look after
                return
            self.cluster.tick(1)
        raise AssertionError("it acts without end")

    def slots_took(self, start: float, load: float, *, every: float) -> None:
        """Seconds that every slot which runs says of its own start and load; then two looks."""
        for pod in self.cluster.pods_of("chat"):
            slot = self.cluster.slot_of(pod)
            assert slot is not None
            slot.took = Took(start, load, slot.prepare.layers_total)
        self.cluster.told()
        self.looks(2, every=every)

    def looks(self, times: int, *, every: float = 5) -> None:
        for _ in range(times):
            self.look()
            self.cluster.tick(every)

    def condition(self, name: str) -> Condition:
        return next(each for each in self.status.conditions if each.type == name)

    def nodes(self) -> list[str]:
        return [stage.node for stage in self.status.stages]

    def reasons(self) -> list[str]:
        return [planned.reason for planned in self.plans]

    def edit(self, **parts: Any) -> None:
        self.cluster.edit("chat", **parts)

    def pods(self) -> dict[str, str]:
        """Of slots: name -> uid."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.cluster.pods_of("chat")}


AWorld = Callable[..., World]  # of nodes with these names
