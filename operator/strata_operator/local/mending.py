"""What a local deployment does about a slot that is gone for good: the repair of its plan at once, a better plan while that serves.

Called by `deployment`. Slots that were never started are not counted on: a repair is made of those that run.
"""

import logging
from dataclasses import replace

from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.replan.decision import ReplanWishes, replan
from strata_planner.replan.repair import Takeover, repair
from strata_planner.replan.shadows import with_shadows
from strata_planner.replan.standing_orders import only, with_orders

log = logging.getLogger(__name__)


class Mender:
    """`request`: what the deployment was planned for; it shrinks with every loss. `shadow_bytes`: of host memory on each slot. `orders`: whether plans have
    standing ones.
    """

    def __init__(
        self, request: PlanRequest, takeover: Takeover, min_gain: float, shadow_bytes: int = 0, *, orders: bool = False
    ) -> None:
        self._request, self._takeover, self._min_gain = request, takeover, min_gain
        self._shadow_bytes, self._orders = shadow_bytes, orders

    def repaired(self, plan: Plan, slot: str) -> Plan | None:
        """Without this slot; None where its layers find no place, which the log says."""
        lost = {place for stage in plan.stages if stage.slot == slot for place in stage.places}
        self._request = replace(self._request, cluster=only(self._request.cluster, plan.places - lost))
        try:
            found = repair(self._request, plan, self._takeover)
        except PlannerError as error:
            log.warning("%s is gone, and its layers find no place: %s", slot, error)
            return None
        log.warning(
            "%s is gone: its layers are taken over by the others (%s, %d layers moved, %d of fewer bits), found in %.1f ms; %.0f %% is kept; %d of %d MiB are shadowed",
            slot,
            found.kind,
            found.movement.moved_layers,
            len(found.lowered),
            1e3 * found.seconds,
            100 * found.note.kept_share,
            found.shadowed_bytes >> 20,
            found.movement.loaded_bytes >> 20,
        )
        return found.plan

    def improved(self, plan: Plan) -> Plan:
        """The plan, or a better one that gains enough, of the same slots. It takes as long as planning does."""
        try:
            found = replan(self._request, plan, ReplanWishes(min_gain=self._min_gain))
        except PlannerError as error:
            log.warning("no better plan than the repair: %s", error)
            return plan
        log.info("the repair %s: %s", "stays" if found.kept else "is replaced", found.reason)
        shadowed = with_shadows(self._request, found.plan, self._takeover, self._shadow_bytes).plan
        return with_orders(self._request, shadowed, self._takeover, wanted=self._orders).plan
