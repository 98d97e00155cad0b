"""What speculation should bring a plan, as people read it: beside the prediction, which counts none of it. Used by `explain`."""

from strata_planner.contract.forecast import AtAcceptance, Speculated, SpeculationForecast
from strata_planner.contract.plan import Plan

_HOW_TO_MEASURE = "`strata up` with this deployment measures how many are, and keeps it for the next plan"


def forecast_lines(plan: Plan) -> list[str]:
    """None without speculation."""
    told = plan.prediction.speculation
    if told is None:
        return []
    return _measured(told, told.cases[0]) if told.measured else _assumed(told)


def _measured(told: SpeculationForecast, case: AtAcceptance) -> list[str]:
    some = f", and {told.guessed:.0%} of steps have drafts" if told.guessed < 1 else ""
    return [
        f"speculation {told.mode}, {_tokens(told.tokens)}: a draft is right in {case.acceptance:.0%} of cases{some} ({told.source})",
        f"  one stream: {_gain(case.one_stream)}",
        f"  {_load(case.planned)}: {_gain(case.planned)}",
        "  the figures above are without it",
    ]


def _assumed(told: SpeculationForecast) -> list[str]:
    looked_up = not any(case.one_stream.draft_seconds for case in told.cases)
    some = " and every step has some" if looked_up else ""
    lines = [
        line
        for case in told.cases
        for line in (
            f"  if {case.acceptance:.0%} are{some}: one stream {_gain(case.one_stream)}",
            f"    {_load(case.planned)} {_gain(case.planned)}",
        )
    ]
    first = f"speculation {told.mode}, {_tokens(told.tokens)}: how many drafts are right is assumed, and the figures above are without it"
    return [first, *lines, f"  {_HOW_TO_MEASURE}"]


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _load(told: Speculated) -> str:
    return f"{told.sequences} in flight"


def _gain(load: Speculated) -> str:
    """What it gains, whether it pays, and with how many tokens it pays most."""
    if not load.drafts:
        return "none: a step has no room for drafts, or no number of them pays"
    rates = f"{load.tokens_per_second:.4g} instead of {load.plain_tokens_per_second:.4g} tokens/s"
    return f"x {load.speed_up:.2f} ({rates}): {_verdict(load)}"


def _verdict(load: Speculated) -> str:
    if not load.best_tokens:
        return "it does not pay with any number of tokens"
    best = f"most with {_tokens(load.best_tokens)}"
    if load.best_tokens == load.drafts:
        return f"it pays, {best}"
    does = "it pays" if load.speed_up > 1 else "it does not pay"
    return f"{does}, {best} (x {load.best_speed_up:.2f})"
