"""Which slots of a local deployment are away, and whether they are waited for or taken over: the operator's rule (`decide.comeback`) over local processes.

Used by `deployment`. Pure; times are the caller's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from strata_operator.decide.comeback import Pace, back_off_seconds, served_share, still_to_go, weigh
from strata_operator.render.records import Weighed
from strata_planner.contract.control import SlotStatus, Took
from strata_planner.contract.plan import Plan
from strata_planner.replan.repair import Repair

START_SECONDS = 1.0  # of a fork of a process that has imported all, before any was seen
STEADY_SECONDS = 10.0  # so long a slot that was taken over must answer, before it is planned with again
MOST_DOUBLINGS = 6  # of those seconds, one for each refusal


class Down(NamedTuple):
    """A slot without a process that serves: seconds since the last one's end, and how many in a row have ended before they served."""

    elapsed: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Losses:
    """`took`: by slot, what its process took when it was last started. `away`: slots that others have taken over, with the moment since which they answer again;
    None: they do not. `refused`: how often one that answers has refused its part of a plan; it is tried again later each time.
    """

    took: Mapping[str, Took] = field(default_factory=dict)
    away: Mapping[str, float | None] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    def seen(self, statuses: Mapping[str, SlotStatus], now: float) -> "Losses":
        """After a look. What a process took is told once it serves."""
        took = {slot: status.took for slot, status in statuses.items() if status.took and status.committed_epoch}
        away = {
            slot: (since if since is not None else now) if slot in statuses else None
            for slot, since in self.away.items()
        }
        return replace(self, took={**self.took, **took}, away=away)

    def taken_over(self, slots: frozenset[str]) -> "Losses":
        return replace(self, away={**self.away, **dict.fromkeys(slots)})

    def with_refusal(self, slot: str) -> "Losses":
        return replace(self, refused={**self.refused, slot: self.refused.get(slot, 0) + 1})

    def back(self, now: float) -> frozenset[str]:
        """Those that stay."""
        return frozenset(slot for slot, until in self._steady().items() if now >= until)

    def without(self, slots: frozenset[str]) -> "Losses":
        """They are planned with again."""
        return replace(self, away={slot: since for slot, since in self.away.items() if slot not in slots})

    def next_look(self, now: float) -> float | None:
        """Seconds until somebody who is there has stayed; None: nobody is."""
        return min((max(0.0, until - now) for until in self._steady().values()), default=None)

    def _steady(self) -> dict[str, float]:
        """When those that answer will have stayed."""
        return {
            slot: since + STEADY_SECONDS * 2 ** min(self.refused.get(slot, 0), MOST_DOUBLINGS)
            for slot, since in self.away.items()
            if since is not None
        }

    def weighed(self, plan: Plan, repair: Repair, down: Mapping[str, Down]) -> Weighed:
        """`down`: slots of the plan; `repair`: without them. A process that ended before it served is tried again soon, and believed as late as a kubelet
        would.
        """
        pace = Pace(self.took, START_SECONDS)
        restart = max(
            still_to_go(back_off_seconds(each.failed) + pace.restart_seconds(plan, slot), each.elapsed)
            for slot, each in down.items()
        )
        takeover = pace.takeover_seconds(plan, repair.note)
        return weigh(restart, takeover, repair.note.kept_share, served_share(plan, frozenset(down)))
