"""Whether the slots of a local deployment get on with the epoch that is being prepared. Called by its control loop.

The same rule as the operator's (`replanning.prepareTimeoutSeconds`), with memory in place of status. Knows no process.
"""

from collections.abc import Mapping

from strata_operator.decide.epochs import progress_of, slots_of
from strata_operator.render.epoch import Epoch
from strata_planner.contract.control import SlotStatus
from strata_planner.contract.plan import Plan


class Progress:
    """Told what is seen at every look; remembers how far each slot has come and since when."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._epoch = 0
        self._reached: dict[str, tuple[tuple[int, int], float]] = {}  # with what is loaded on the way to the next layer

    def stalled(self, epoch: Epoch | None, slots: Mapping[str, SlotStatus], now: float) -> str:
        """A sentence about the first slot that got no further for too long; empty while all do. `epoch`: not committed yet."""
        if epoch is None:
            return ""
        if epoch.number != self._epoch:
            self._epoch, self._reached = epoch.number, {}
        for slot in sorted(slots_of(epoch.plan)):
            (reached, loaded), since = self._reached.get(slot, ((-1, 0), now))
            here, status = progress_of(epoch.number, slots.get(slot)), slots.get(slot)
            more = status.prepare.progress if status and status.prepare.epoch == epoch.number else 0
            everything = 1 + sum(last - first + 1 for first, last in layers_of(epoch.plan, slot))
            # Who had everything and was started anew begins anew.
            if (here, more) > (reached, loaded) or reached >= everything > here:
                self._reached[slot] = ((here, more), now)
            elif now - since >= self._timeout_seconds and not _has_prepared(epoch, slots.get(slot)):
                where = f"{reached - 1} layers are loaded" if reached else "it does not answer"
                return (
                    f"slot {slot} made no progress in loading for {self._timeout_seconds:g} s "
                    f"(replanning.prepareTimeoutSeconds): {where}; see its log, or raise the time for a slow disk or download"
                )
        return ""


def layers_of(plan: Plan, slot: str) -> list[tuple[int, int]]:
    """First and last layer of each of its stages."""
    return [stage.layers for stage in plan.stages if stage.slot == slot]


def _has_prepared(epoch: Epoch, status: SlotStatus | None) -> bool:
    return status is not None and status.prepare.epoch == epoch.number and status.prepare.phase != "loading"
