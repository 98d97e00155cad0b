"""The whole chain with standing orders, and an operator that dies, stays away and returns."""

from typing import Any

from strata_planner.contract.control import Prepare
from strata_runtime.slot.slot import Slot
from tests.chain.cluster import NAME, ChainSlot
from tests.chain.world import ChainWorld

SILENCE_SECONDS = 10


class OrderedWorld(ChainWorld):
    """`away`: no operator runs."""

    def __init__(self, seed: int = 0, *, tight: bool = True, gateways: int = 2, logged: int = 0) -> None:
        super().__init__(seed, tight=tight, gateways=gateways, logged=logged)
        self.away = False
        self._told: dict[int, Any] = {}  # epoch -> its key, and what each slot was told of it
        self._real = Slot._prepare
        self._put(Slot, _prepare=lambda slot, prepare: self._prepares(slot, prepare))  # noqa: PLW0108  a function becomes a method
        takeover = {"standingOrders": {"silenceSeconds": SILENCE_SECONDS}}
        self.cluster.edit(NAME, replanning={"prepareTimeoutSeconds": 30, "takeover": takeover})

    def _prepares(self, slot: Slot, prepare: Prepare) -> None:
        """One plan to each number, whoever says it."""
        key, roles = self._told.setdefault(prepare.epoch, (prepare.key, {}))
        told = (prepare.roles, [prepare.formed_in(place) for place in range(len(prepare.roles))])
        if key != prepare.key or roles.setdefault(slot._name, told) != told:
            self.cluster.found.append(f"epoch {prepare.epoch} is made twice, unlike")
        self._real(slot, prepare)

    # What the operator does.

    def operator_dies(self) -> None:
        if not self.away:
            self.operator.close()
            self.away = True

    def operator_returns(self) -> None:
        if self.away:
            self.operator, self.away = self._a_new_operator(), False

    def operator_starts_anew(self) -> None:
        self.operator_dies()
        self.operator_returns()

    def _look(self) -> None:
        """Whoever it reaches has heard it: it asks everybody each few seconds."""
        if self.away:
            return
        super()._look()
        for pod in self.cluster.pods_of(NAME):
            speaks = self.cluster.slot_of(pod)
            there = pod["spec"].get("nodeName") not in self.cluster.faults.unreachable and not self.cluster.is_stopped(
                pod
            )
            if isinstance(speaks, ChainSlot) and there:
                speaks.process.hears_the_controller()
        for gateway in self.cluster.gateways.values():
            gateway.orders.hear()

    def heal(self) -> None:
        self.operator_returns()
        if (
            not self.cluster.slots()
        ):  # while nobody was there, all of them ended for good: that many devices do not live
            self.cluster.dead.clear()
        super().heal()

    def close(self) -> None:
        self.operator_returns()
        super().close()

    # What is seen.

    @property
    def replans(self) -> list[tuple[str, str | None]]:
        """Reason and node of each, as status has them."""
        thing = self.cluster.one("llmdeployments", NAME)
        assert thing is not None
        return [(each["reason"], each.get("node")) for each in thing.get("status", {}).get("replans", [])]
