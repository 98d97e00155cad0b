"""What a local deployment plans when slots are lost or come back: a repair at once, a better plan while that serves.

Called by `deployment`. Slots that were never started are not counted on: a repair is made of those that run.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.plan import Place, Plan
from strata_planner.errors import PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.replan.decision import ReplanWishes, replan
from strata_planner.replan.repair import Repair, Takeover, repair
from strata_planner.replan.shadows import with_shadows
from strata_planner.replan.standing_orders import only, with_orders

log = logging.getLogger(__name__)


class Mender:
    """`request`: what the deployment was planned for. `shadow_bytes`: of host memory on each slot. `orders`: whether plans have standing ones."""

    def __init__(
        self, request: PlanRequest, takeover: Takeover, min_gain: float, shadow_bytes: int = 0, *, orders: bool = False
    ) -> None:
        self._request, self._takeover, self._min_gain = request, takeover, min_gain
        self._shadow_bytes, self._orders = shadow_bytes, orders
        self._places: dict[str, frozenset[Place]] = {}  # of every slot that was planned with
        self._lost: frozenset[str] = frozenset()

    def repaired(self, plan: Plan, slots: Iterable[str]) -> Repair | None:
        """Without these slots and those that are lost; None where their layers find no place, which the log says."""
        slots = frozenset(slots)
        try:
            return repair(self._without(plan, slots), plan, self._takeover)
        except PlannerError as error:
            log.info("the layers of %s find no place: %s", " and ".join(sorted(slots)), error)
            return None

    def lose(self, plan: Plan, slots: Iterable[str]) -> None:
        """They are planned without from now on."""
        self._note(plan)
        self._lost |= frozenset(slots)

    def regain(self, slot: str) -> None:
        """It is there again."""
        self._lost -= {slot}

    def improved(self, plan: Plan) -> Plan:
        """The plan, or a better one that gains enough, of the slots that are there. It takes as long as planning does."""
        request = self._without(plan, frozenset())
        try:
            found = replan(request, plan, ReplanWishes(min_gain=self._min_gain), further=with_alternatives)
        except PlannerError as error:
            log.warning("no better plan than the one that serves: %s", error)
            return plan
        log.info("the plan that serves %s: %s", "stays" if found.kept else "is replaced", found.reason)
        shadowed = with_shadows(request, found.plan, self._takeover, self._shadow_bytes).plan
        return with_orders(request, shadowed, self._takeover, wanted=self._orders).plan

    def _without(self, plan: Plan, slots: frozenset[str]) -> PlanRequest:
        self._note(plan)
        away = self._lost | slots
        places = [place for slot, held in list(self._places.items()) if slot not in away for place in held]
        return replace(self._request, cluster=only(self._request.cluster, places))

    def _note(self, plan: Plan) -> None:
        for stage in plan.stages:
            self._places[stage.slot] = self._places.get(stage.slot, frozenset()) | frozenset(stage.places)


def told(found: Repair, slots: Iterable[str]) -> str:
    """A repair as a sentence."""
    return (
        f"the layers of {' and '.join(sorted(slots))} are taken over by the others ({found.kind}, {found.movement.moved_layers} layers moved, "
        f"{len(found.lowered)} of fewer bits), found in {1e3 * found.seconds:.1f} ms; {100 * found.note.kept_share:.0f} % is kept; "
        f"{found.shadowed_bytes >> 20} of {found.movement.loaded_bytes >> 20} MiB are shadowed"
    )
