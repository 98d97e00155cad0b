"""What a plan should give for its workload: rate, latencies, and what binds it.

Called by `assembly`. Two accounts of the same stage times: `latency_seconds` is LLM-PQ's objective (arXiv 2403.01136, equation
4: after every token the pipeline is filled anew); the rate and the time per token are those of continuous batching, where a
micro-batch enters as soon as its last token is back, so that a round takes max(micro-batches x slowest, sum of stages).
"""

from strata_planner.contract.plan import Prediction
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.problem import Counts, Problem
from strata_planner.search.exact.search import Found
from strata_planner.sensitivity import perplexity_increase_of


def predict(request: PlanRequest, found: Found) -> Prediction:
    problem, counts = found.problem, found.solution.counts
    load = request.workload
    prefill, first_token = _prefill(request, found)
    round_seconds = _decode_round(request, found)
    generation = (load.output_tokens - 1) * round_seconds
    return Prediction(
        tokens_per_second=load.concurrency * load.output_tokens / (prefill + generation),
        ttft_ms=first_token * 1e3,
        tpot_ms=round_seconds * 1e3,
        latency_seconds=problem.latency_seconds(counts),
        quality_penalty=problem.penalty(counts),
        sensitivity_source=request.omega.source,
        bound_by=bound_by(found),
        perplexity_increase=_perplexity_increase(request, found),
    )


def _perplexity_increase(request: PlanRequest, found: Found) -> float | None:
    if request.omega.fit is None:
        return None
    return perplexity_increase_of(request.omega, found.problem.penalty(found.solution.counts))


def _prefill(request: PlanRequest, found: Found) -> tuple[float, float]:
    """Seconds until the whole batch, arriving at once, has its first tokens; and on average over its sequences."""
    slowest, total = _times(found.problem, found.solution.counts, 0)
    count = -(-request.workload.concurrency // found.candidate.prefill)
    return total + (count - 1) * slowest, total + (count - 1) / 2 * slowest


def _decode_round(request: PlanRequest, found: Found) -> float:
    """Seconds from one token of a sequence to its next."""
    slowest, total = _times(found.problem, found.solution.counts, 1)
    return max(total, -(-request.workload.concurrency // found.candidate.decode) * slowest)


def _times(problem: Problem, counts: Counts, phase: int) -> tuple[float, float]:
    """The slowest stage or hop of a phase, and the sum over all of them."""
    stages = [problem.stage_seconds(counts, j)[phase] for j in range(len(problem.stages))]
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
    seconds = [problem.stage_seconds(counts, j)[phase] for j in range(len(problem.stages))]
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
