"""What a plan's prediction says beside its own figures: what speculation should bring it, and what users see while requests come at random.

Worked out by `simulate.speculation` and `simulate.arrivals`, told by `answer.speculation` and `answer.explain`. Knows no costs.
"""

from strata_planner.contract.values import Value


class Speculated(Value, frozen=True):
    """With `sequences` in flight. A round drafts `drafts` tokens of each, as many as are wished and there is room for (of `auto` those that pay), and
    verifies them together.

    `speed_up`: of decoding; `tokens_per_second` with it and `plain_tokens_per_second` without. `best_tokens`: with which `speed_up` would be the
    most; 0: none pays.
    """

    sequences: int
    drafts: int
    step_seconds: float
    draft_seconds: float  # of one draft step; 0 where guesses are looked up
    verification_seconds: float
    speed_up: float
    tokens_per_second: float
    plain_tokens_per_second: float
    best_tokens: int
    best_speed_up: float


class AtAcceptance(Value, frozen=True):
    """If a draft is right with the chance `acceptance` where all before it are. `one_stream`: while one sequence decodes alone; `planned`: at the
    plan's concurrency, prompts included.
    """

    acceptance: float
    one_stream: Speculated
    planned: Speculated


class SpeculationForecast(Value, frozen=True):
    """`cases`: one where it was measured, else one for each assumed acceptance. `source`: how it is known; `guessed`: the share of steps that have
    something to verify.
    """

    mode: str
    tokens: int
    measured: bool
    source: str
    guessed: float
    cases: tuple[AtAcceptance, ...]


class ArrivalForecast(Value, frozen=True):
    """While `requests_per_second` come at random (a Poisson process; None: each as another has its answer, as many in flight as the plan is for), of at most
    `most_requests_per_second` that the plan answers, as predicted. Means, and what one request in ten waits at least, over `simulated_requests`. All None
    and 0 where more come than are answered: the queue grows without end.
    """

    requests_per_second: float | None
    most_requests_per_second: float
    ttft_ms: float | None = None
    ttft_p90_ms: float | None = None
    tpot_ms: float | None = None
    simulated_requests: int = 0
