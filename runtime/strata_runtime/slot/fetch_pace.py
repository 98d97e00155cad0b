"""Whether pages are fetched more slowly than they would be computed again. Asked by `gathering` where nothing is served meanwhile: what is quicker is wanted then.

Told by what came, in tokens x layers: bytes are as many for each, and what is still to come is fetched and computed alike. Pure.
"""

from dataclasses import dataclass

from strata_planner.contract.control import PlannedStep
from strata_planner.contract.roles import Role

TRIAL_SECONDS = 0.5  # before that nothing is known: a giver may be held up once
TIMES = 2.0  # layers before may have to compute too, and slots give at the same time


@dataclass(frozen=True, slots=True)
class Came:
    """`computed`: tokens x layers, without those of the first message, which may have waited for its giver's prepare or commit, and came at `since`."""

    since: float
    computed: int = 0


def after_message(came: Came | None, computed: int, now: float) -> Came:
    return Came(now) if came is None else Came(came.since, came.computed + computed)


def seconds_each(role: Role, planned: PlannedStep) -> float:
    """Of a token in a layer of the role, by the plan's largest step; 0 where none was planned."""
    layers = role.layers[1] - role.layers[0] + 1
    return planned.stage_seconds / (role.micro_batch.max_step_tokens * layers)


def is_slower(came: Came | None, now: float, each: float) -> bool:
    """`each`: as of `seconds_each`. Never where that is not known, or nothing has come."""
    if came is None or each <= 0:
        return False
    return now - came.since > max(TRIAL_SECONDS, TIMES * came.computed * each)
