"""Which slots of a local deployment are away, and whether they are waited for or taken over: the operator's rule (`decide.comeback`) over local processes.

Used by `deployment`. Pure; times are the caller's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from strata_operator.decide.comeback import Pace, back_off_seconds, served_share, still_to_go, weigh
from strata_operator.render.records import Weighed
from strata_planner.contract.control import SlotStatus, Took
from strata_planner.contract.plan import Plan
from strata_planner.replan.repair import Repair

START_SECONDS = 1.0  # of a fork of a process that has imported all, before any was seen
STEADY_SECONDS = 10.0  # so long a slot that was taken over must answer, before it is planned with again


class Down(NamedTuple):
    """A slot without a process that serves: seconds since the last one's end, and how many in a row have ended before they served."""

    elapsed: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Losses:
    """`took`: by slot, what its process took when it was last started. `away`: slots that others have taken over, with the moment since which they answer again;
    None: they do not.
    """

    took: Mapping[str, Took] = field(default_factory=dict)
    away: Mapping[str, float | None] = field(default_factory=dict)

    def seen(self, statuses: Mapping[str, SlotStatus], now: float) -> "Losses":
        """After a look. What a process took is told once it serves."""
        took = {slot: status.took for slot, status in statuses.items() if status.took and status.committed_epoch}
        away = {
            slot: (since if since is not None else now) if slot in statuses else None
            for slot, since in self.away.items()
        }
        return Losses({**self.took, **took}, away)

    def taken_over(self, slots: frozenset[str]) -> "Losses":
        return Losses(self.took, {**self.away, **dict.fromkeys(slots)})

    def back(self, now: float) -> frozenset[str]:
        """Those that stay."""
        return frozenset(
            slot for slot, since in self.away.items() if since is not None and now - since >= STEADY_SECONDS
        )

    def without(self, slots: frozenset[str]) -> "Losses":
        """They are planned with again."""
        return Losses(self.took, {slot: since for slot, since in self.away.items() if slot not in slots})

    def next_look(self, now: float) -> float | None:
        """Seconds until somebody who is there has stayed; None: nobody is."""
        return min(
            (max(0.0, since + STEADY_SECONDS - now) for since in self.away.values() if since is not None), default=None
        )

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
