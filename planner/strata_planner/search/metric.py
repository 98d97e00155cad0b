"""What plans are compared by: one number for the goal, in its own unit, from what is predicted of a plan.

Called by the searches, by replanning and by the table of alternatives, so that all three mean the same by "better".

throughput  tokens a second; what `qualityWeight` takes for bits is taken from them
latency     seconds of a request, from its prompt to its last token, all of the load there at once: what finds no place waits its turn
cost        money for a million tokens; what finds no place waits its turn here too, and counts as often
slo         the share of requests that are in time; of plans that are in time for all or for none, what could be served decides

Where one pipeline is asked for (the solvers `pipeline`, `exact` and `transfer`) it is LLM-PQ's objective, in seconds of the batch.
"""

from dataclasses import dataclass

import msgspec

from strata_planner.contract.judged import IN_TIME, Stated
from strata_planner.contract.plan import Plan, Prediction
from strata_planner.question.request import ONE_PIPELINE, Objective, PlanRequest

SPARE = 0.02  # what a load less of the capacity is worth, for bursts, where all are in time
SPREAD = 0.2  # how far requests differ in their seconds, as a share


def share_in_time(deadline: float, seconds: float) -> float:
    """Of requests that take `seconds` in the middle: all of them well below the deadline, none well above."""
    return min(1.0, max(0.0, 0.5 + (deadline / seconds - 1) / SPREAD))


@dataclass(frozen=True)
class Metric:
    """Of one request. `of` gives a number, more of which is better, whatever the goal."""

    objective: Objective
    theta: float
    output_tokens: int
    asked: int  # sequences in flight
    of_the_batch: bool

    @classmethod
    def for_request(cls, request: PlanRequest) -> "Metric":
        of_the_batch = request.solver in ONE_PIPELINE
        load = request.workload
        return cls(request.objective, request.theta, load.output_tokens, load.concurrency, of_the_batch)

    def of(self, prediction: Prediction, sequences: int, hourly_cost: float = 0.0) -> float:
        """`sequences`: in flight; `hourly_cost`: of all devices of the plan, 0 where nobody named one."""
        turns = max(1.0, self.asked / sequences)
        if self.of_the_batch:
            return -(turns * prediction.latency_seconds + self.theta * prediction.quality_penalty)
        match self.objective.goal:
            case "latency":
                return -(turns * self._request_seconds(prediction) + self.theta * prediction.quality_penalty)
            case "slo":
                return self._in_time(prediction)
            case "cost" if hourly_cost:
                return -turns * hourly_cost / 3600 / self._tokens_per_second(prediction, sequences) * 1e6
            case _:
                return self._tokens_per_second(prediction, sequences)

    def stated(self, value: float) -> Stated:
        """For people, in the goal's own unit."""
        off, on = (f", what its bits cost {how}" if self.theta else "" for how in ("taken off", "added"))
        if self.of_the_batch:
            return Stated(-value, f"s for the batch{on}", "less")
        match self.objective.goal:
            case "latency":
                return Stated(-value, f"s a request{on}", "less")
            case "cost":
                return Stated(-value, f"for 1M tokens, times the turns of the load{on}", "less")
            case "slo":
                return Stated(min(1.0, max(0.0, value)), IN_TIME, "more")
            case _:
                return Stated(value, f"tokens/s{off}", "more")

    def said(self, value: float) -> str:
        """With its unit."""
        return self.stated(value).said()

    def _request_seconds(self, prediction: Prediction) -> float:
        return (prediction.ttft_ms + (self.output_tokens - 1) * prediction.tpot_ms) / 1e3

    def _tokens_per_second(self, prediction: Prediction, sequences: int) -> float:
        """The batch's seconds with the penalty's beside them (LLM-PQ's objective), as a rate."""
        seconds = sequences * self.output_tokens / prediction.tokens_per_second
        return sequences * self.output_tokens / (seconds + self.theta * prediction.quality_penalty)

    def _in_time(self, prediction: Prediction) -> float:
        deadline, asked = self.objective.deadline_seconds, self.objective.requests_per_second
        assert deadline is not None, "the request is checked"
        assert asked is not None, "the request is checked"
        capacity = prediction.tokens_per_second / self.output_tokens
        seconds, served = self._request_seconds(prediction), min(1.0, capacity / asked)
        share = served * share_in_time(deadline, seconds)
        if share >= 1:
            return 1 + SPARE * max(0.0, 1 - asked / capacity)
        return share or SPARE * (served * min(1.0, deadline / seconds) - 1)


def value_of_plan(request: PlanRequest, plan: Plan) -> float:
    """By the request's metric; the devices that the plan uses are paid for."""
    used = plan.places
    cost = sum(each.hourly_cost or 0.0 for each in request.cluster.accelerators() if each.place in used)
    return Metric.for_request(request).of(plan.prediction, sum(each.concurrency for each in plan.replicas), cost)


def with_objective(request: PlanRequest, plan: Plan) -> Plan:
    """The plan that says how good it is."""
    return msgspec.structs.replace(plan, objective=Metric.for_request(request).stated(value_of_plan(request, plan)))


def gain(new: float, old: float) -> float:
    """By what share of the old value the new one is better; negative where it is worse."""
    return (new - old) / abs(old) if old else 0.0
