"""What a plan should give for its workload: rate, latencies, and what binds it.

Called by `assembly` and by searches. Two accounts: `latency_seconds` is LLM-PQ's objective (arXiv 2403.01136, equation 4: a batch is
prefilled, then decoded, and after every token the pipeline is filled anew); the rate, the time to the first token and the time per token
are those of a pipeline that is never empty (`steady`), with as many requests in flight as the plan is for.
"""

import math
from dataclasses import replace

import numpy as np

from strata_planner.contract.plan import Prediction, steps_under_way
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.problem import Counts, Problem
from strata_planner.search.steady import Load, StageSteps, Steady, least_share, micro_batches_of, steady
from strata_planner.sensitivity import perplexity_increase_of


def predict(pricer: Pricer, found: Found) -> Prediction:
    """`pricer`: of the request that was searched."""
    request, problem, counts = pricer.request, found.problem, found.solution.counts
    running = _steady(pricer, found)
    return Prediction(
        tokens_per_second=float(running.requests_per_second[0]) * request.workload.output_tokens,
        ttft_ms=float(running.first_token[0]) * 1e3,
        tpot_ms=float(running.next_token[0]) * 1e3,
        latency_seconds=problem.latency_seconds(counts),
        quality_penalty=problem.penalty(counts),
        sensitivity_source=request.omega.source,
        bound_by=bound_by(found),
        perplexity_increase=_perplexity_increase(request, found),
    )


def steps_of(pricer: Pricer, found: Found) -> Problem:
    """Of the same candidate, with the phases of a pipeline that is never empty."""
    return found.problem if pricer.steady else Pricer(replace(pricer.request, solver="auto")).problem(found.candidate)


def least_prompt_tokens(pricer: Pricer, found: Found, steps: Problem) -> int:
    """The plan's `MicroBatch.least_prompt_tokens`; `steps`: as `steps_of` has it."""
    share = least_share(_stage_steps(pricer, found, steps), has_experts=pricer.request.model.has_experts)
    return math.ceil(float(share[0]) * pricer.prompts(found.candidate.pair).rows)


def _steady(pricer: Pricer, found: Found) -> Steady:
    pair, load = found.candidate.pair, pricer.request.workload
    count = len(found.candidate.order)
    batches = micro_batches_of(load.concurrency, count, pair)
    told = (load.concurrency, batches, steps_under_way(pair.count, count), pricer.prompts(pair).steps)
    in_flight, cut, under, steps = (np.array([float(each)]) for each in told)
    lengths = (load.output_tokens, load.prompt_tokens, load.prompt_variation)
    requests = Load(in_flight, cut, under, steps, *lengths, has_experts=pricer.request.model.has_experts)
    return steady(_stage_steps(pricer, found, steps_of(pricer, found)), requests)


def _stage_steps(pricer: Pricer, found: Found, problem: Problem) -> StageSteps:
    """With arrays of one load."""
    pair, counts = found.candidate.pair, found.solution.counts
    times = np.array(problem.all_seconds(counts))
    hops = np.array([each.transfer_seconds for each in problem.stages])
    latency = np.array([[each.latency_seconds] for each in problem.stages])
    varies = np.array([[group.step_variation] for group in found.candidate.order])
    begun = np.zeros((len(problem.stages), 1))
    for (run, place, bits), units in counts.items():
        begun[place] += units * pricer.begun(found.candidate.order[place], pair)[run][bits]
    return StageSteps(times[:, 1:], times[:, :1], hops[:, 1:] - latency, hops[:, :1], latency, varies, begun)


def _perplexity_increase(request: PlanRequest, found: Found) -> float | None:
    if request.omega.fit is None:
        return None
    return perplexity_increase_of(request.omega, found.problem.penalty(found.solution.counts))


def _times(problem: Problem, counts: Counts, phase: int) -> tuple[float, float]:
    """The slowest stage or hop of a phase, and the sum over all of them."""
    stages = [each[phase] for each in problem.all_seconds(counts)]
    hops = [stage.transfer_seconds[phase] for stage in problem.stages]
    return max(stages + hops), sum(stages + hops)


def bound_by(found: Found) -> str:
    """What to change first to get a better plan: memory where it keeps layers at fewer bits, else the slowest part."""
    problem, counts = found.problem, found.solution.counts
    names = [f"stage {j} ({group})" for j, group in enumerate(found.candidate.order)]
    tight = _tight_stage(found)
    if tight is not None:
        stage, bits = tight
        return f"memory of {names[stage]}, where no layer more fits at {bits} bits"
    weights = (problem.slowest_prefill + 1, problem.slowest_decode + problem.sum_decode)
    shares = [weights[phase] * _times(problem, counts, phase)[0] for phase in (0, 1)]
    phase = 0 if shares[0] > shares[1] else 1
    seconds = [each[phase] for each in problem.all_seconds(counts)]
    hops = [stage.transfer_seconds[phase] for stage in problem.stages]
    kind = ("prefill", "decode")[phase]
    if max(hops) > max(seconds):
        return f"{kind} hop after {names[hops.index(max(hops))]}"
    return f"{kind} time of {names[seconds.index(max(seconds))]}"


def _tight_stage(found: Found) -> tuple[int, int] | None:
    """The fullest stage with a layer below the most bits allowed that its memory keeps from the next bits, and those bits."""
    problem, counts = found.problem, found.solution.counts
    tight: list[tuple[float, int, int]] = []
    for (r, j, bits), count in counts.items():
        higher = [each for each in problem.stages[j].seconds[r] if each > bits]
        if not count or not higher:
            continue
        upgraded = counts | {(r, j, bits): count - 1, (r, j, min(higher)): counts.get((r, j, min(higher)), 0) + 1}
        if problem.free_bytes(upgraded, j) < 0 and problem.objective(upgraded) < problem.objective(counts):
            tight.append((problem.free_bytes(counts, j) / max(1, problem.stages[j].capacity_bytes), j, min(higher)))
    return min(tight)[1:] if tight else None
