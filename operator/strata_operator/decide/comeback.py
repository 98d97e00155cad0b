"""Restart or takeover: whether a slot whose process is gone is waited for, or its layers are taken over by the slots that are left.

Called by `weighing`. Pure. **The rule** compares what users go without, in seconds of the plan's own rate:

    restart:   (1 - m) R
    takeover:  (1 - m) (1.5 T + 1) + (1 - k) (R + 10 - T)

R: seconds until the slot serves again; T: until the repaired plan does, with a margin, as it is predicted and a change of plan costs more
than it says. m: the share of the plan that whole replicas serve meanwhile; k: the share that the repaired plan gives. The repair serves until
the device is back (R) and a better plan has been found and loaded beside it. Takeover is taken where it costs less. What is computed again is
what the lost layers are of all, whoever computes it, and left out of both. So a repair that only leaves a replica out (k = m) is never taken:
waiting costs no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from strata_operator.render.records import Weighed
from strata_planner.contract.control import Took
from strata_planner.contract.plan import Plan
from strata_planner.contract.rates import PORT_BYTES_PER_SECOND, READ_BYTES_PER_SECOND
from strata_planner.replan.repair import RepairNote

SWITCH_SECONDS = 0.4  # from a plan to its epoch in force, beside loads (docs/benchmarks.md, `elastic`)
GROW_SECONDS = 10.0  # to find a better plan once a device is back, and to load it beside the repair
MARGIN, SLACK_SECONDS = 1.5, 1.0  # of what is predicted
LATE = 1.5  # of what a restart should take: who is not back by then is believed no more
BACK_OFF_SECONDS = 10.0  # before a container is started again whose last process ended early, twice as long each further time: a kubelet's CrashLoopBackOff


@dataclass(frozen=True, slots=True)
class Pace:
    """`took`: by slot, what its process took when it was last started, for the layers that the plan gives it. `start_seconds`: of a process of which nothing was seen.
    `again_seconds`: until whoever starts processes has begun to.
    """

    took: Mapping[str, Took]
    start_seconds: float
    again_seconds: float = 0.0

    def bytes_per_second(self, plan: Plan) -> float:
        """Of loads: of all that were seen, else the rate that loads are predicted by."""
        sizes = weights_of(plan)
        seen = [(sizes[slot], took.load_seconds) for slot, took in self.took.items() if slot in sizes]
        seconds = sum(each for _, each in seen)
        return sum(size for size, _ in seen) / seconds if seconds > 0 else READ_BYTES_PER_SECOND

    def restart_seconds(self, plan: Plan, slot: str) -> float:
        """Until a slot serves again: as its process took the last time, or as the others' took; predicted from bytes where none was seen."""
        own = self.took.get(slot)
        others = max((each.start_seconds for each in self.took.values()), default=self.start_seconds)
        start = others if own is None else own.start_seconds
        return self.again_seconds + start + self.load_seconds(plan, slot) + SWITCH_SECONDS

    def load_seconds(self, plan: Plan, slot: str) -> float:
        own = self.took.get(slot)
        return weights_of(plan).get(slot, 0) / self.bytes_per_second(plan) if own is None else own.load_seconds

    def takeover_seconds(self, plan: Plan, note: RepairNote) -> float:
        """Until a repair that is found serves: slots narrow and load side by side, the busiest one counts."""
        read = note.read_bytes / self.bytes_per_second(plan)
        return read + note.device_bytes / PORT_BYTES_PER_SECOND + note.narrow_seconds + SWITCH_SECONDS


def weights_of(plan: Plan) -> dict[str, int]:
    """Bytes of weights and tables that each slot loads."""
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        own = sum(each.weights_bytes + each.embedding_bytes for each in stage.memories)
        sizes[stage.slot] = sizes.get(stage.slot, 0) + own
    return sizes


def served_share(plan: Plan, lost: frozenset[str]) -> float:
    """Of the plan's tokens, those of replicas that have none of the lost slots."""
    rates = [(each.decode_rate, {stage.slot for stage in each.stages}) for each in plan.replicas]
    whole = sum(rate for rate, slots in rates if not slots & lost)
    every = sum(rate for rate, _ in rates)
    return whole / every if every > 0 else 0.0


def back_off_seconds(failed: int) -> float:
    """Before the next start of a process that ended so many times in a row before it served."""
    return BACK_OFF_SECONDS * 2.0 ** (failed - 1) if failed else 0.0


def still_to_go(expected: float, elapsed: float) -> float:
    """Seconds. Who is late is believed to need as long again as it has taken: a wait of twice the best is the worst that comes of it."""
    return max(0.0, expected - elapsed) if elapsed <= LATE * expected + SLACK_SECONDS else elapsed


def weigh(restart: float, takeover: float, kept: float, meanwhile: float) -> Weighed:
    """By the rule above: `restart` R, `takeover` T, `kept` k, `meanwhile` m."""
    kept, waits = min(1.0, kept), 1 - meanwhile
    slower = (1 - kept) * max(0.0, restart + GROW_SECONDS - takeover)
    takes_over = waits * (MARGIN * takeover + SLACK_SECONDS) + slower < waits * restart
    return Weighed("takeover" if takes_over else "restart", round(restart, 2), round(takeover, 2))
