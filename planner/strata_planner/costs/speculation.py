"""What a round of speculation gains: tokens a second beside those of plain steps, from the seconds of its steps and the drafts that are right.

Called by `simulate.speculation` for a plan. Knows no device: seconds are given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from strata_planner.contract.acceptance import expected_tokens

MOST_TOKENS = 15  # of one guess that may be asked for


@dataclass(frozen=True)
class Guessing:
    """How good guesses are. `acceptance`: the chance that one is right if all before it are; `guessed`: the share of steps that have any;
    `filled`: tokens of a guess, as a share of those that were wished.
    """

    acceptance: float
    guessed: float = 1.0
    filled: float = 1.0


@dataclass(frozen=True)
class RoundSeconds:
    """Of a load: a plain step, one step that drafts, and a verification of so many drafts a sequence. `room`: for drafts of one sequence."""

    step: float
    draft: float
    verification: Callable[[int], float]
    room: int = MOST_TOKENS


def speed_up(guessing: Guessing, drafts: int, costs: RoundSeconds) -> float:
    """Tokens a second over those of plain steps. With drafts that cost c = draft / step each and a verification like a step this is
    (1 - a^(k + 1)) / ((1 - a) (k c + 1)): arXiv 2211.17192, theorem 3.8.
    """
    count = min(drafts, costs.room)
    made = count * guessing.filled
    seconds = count * costs.draft + costs.verification(math.ceil(made))
    tokens = expected_tokens(guessing.acceptance, made)
    share = guessing.guessed
    return (share * tokens + 1 - share) * costs.step / (share * seconds + (1 - share) * costs.step)


def best_tokens(guessing: Guessing, costs: RoundSeconds, most: int = MOST_TOKENS) -> tuple[int, float]:
    """The number of drafts up to `most` that gains most, the fewest of equals, and what it gains; 0 and 1 where none pays."""
    gains = ((count, speed_up(guessing, count, costs)) for count in range(1, min(most, costs.room) + 1))
    return max(((0, 1.0), *gains), key=lambda each: each[1])
