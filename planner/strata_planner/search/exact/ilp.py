"""The exact ILP of LLM-PQ (arXiv 2403.01136, section 4.2, equations 4-16) for one candidate, with PuLP on HiGHS.

The reference: called by `exact` where units cost unlike seconds or bytes, and by `search` where a user asks for it. Knows only
the Problem. A piece per family of constraints, every constraint named.

| paper                | here                  | meaning                                                               |
|----------------------|-----------------------|-----------------------------------------------------------------------|
| z[i,j,b]             | units[r,j,b]          | how many units of run r lie on stage j at b bits (0/1 for one unit)   |
| u[i,j]               | present[r,j]          | run r has a unit on stage j                                           |
| -                    | quantized[j]          | stage j holds a unit below 16 bits: it needs more temporaries|
| -                    | dense[j], mixed[j]    | stage j holds a unit at 16 bits; both kinds: more still      |
| T_max^pre, T_max^dec | slowest_prefill/decode| the slowest stage or hop of a micro-batch                             |
| T_pre, T_dec         | in the objective      | sums over the stages, T_dec n-1 times                                 |
| M[i,b], M_j          | Run.bytes, capacity   | bytes of a unit; what stage j has left for units                      |
| l[i,j,b]             | StageCosts.seconds    | seconds of a unit for one micro-batch                                 |
| omega[i,b], theta    | Run.omega, theta      | quality penalty and its weight                                        |
| eta, xi, B, n        | weights of Problem    | micro-batches, batch, tokens to generate                              |

Two things differ from the paper. Hops between stages count in the sums too (a single sequence waits for them). Stages are
never empty: fewer stages are another candidate.
"""

import math
from dataclasses import dataclass

import highspy  # noqa: F401  before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp

from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.problem import Key, Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.highs import optimise

_RELATIVE_GAP = 1e-6
# Shares of the capacity kept free: none at first, a little where the solver's tolerance carried a plan over its memory.
_MEMORY_MARGINS = (0.0, 2e-6)
_SCALE = 1 << 20  # bytes become MiB: coefficients near 1 keep the solver exact


@dataclass(frozen=True)
class _Variables:
    units: dict[Key, pulp.LpVariable]
    present: dict[tuple[int, int], pulp.LpVariable]
    quantized: dict[int, pulp.LpVariable]
    dense: dict[int, pulp.LpVariable]
    mixed: dict[int, pulp.LpVariable]
    slowest_prefill: pulp.LpVariable
    slowest_decode: pulp.LpVariable


def solve(problem: Problem, cutoff: float = math.inf, effort: Effort | None = None) -> Solution:
    """The best split of this candidate that beats `cutoff`; INFEASIBLE where there is none."""
    for margin in _MEMORY_MARGINS:
        model, variables = _build(problem, margin)
        if math.isfinite(cutoff):
            model += model.objective <= cutoff, "beats_incumbent"
        _run(model, None if effort is None or math.isinf(effort.latest) else max(0.0, effort.seconds))
        solution = _solution(problem, model, variables)
        if not solution.counts or problem.is_feasible(solution.counts):
            return solution
    return Solution(SolutionStatus.UNKNOWN, StopReason.PROVED)


def _run(model: pulp.LpProblem, time_limit_seconds: float | None) -> None:
    """Once more without presolve where that fails inside HiGHS ("vector::reserve", 1.15.1)."""
    limits = {"timeLimit": time_limit_seconds, "gapRel": _RELATIVE_GAP}
    try:
        optimise(model, **limits)
    except ValueError:
        optimise(model, presolve="off", **limits)


def _build(problem: Problem, margin: float) -> tuple[pulp.LpProblem, _Variables]:
    model = pulp.LpProblem("layers_and_bits", pulp.LpMinimize)
    variables = _declare(model, problem)
    _add_objective(model, problem, variables)
    _add_every_unit_placed(model, problem, variables)
    _add_no_empty_stage(model, problem, variables)
    _add_order(model, problem, variables)
    _add_symmetry(model, problem, variables)
    _add_memory(model, problem, variables, margin)
    _add_slowest_stage(model, problem, variables)
    _add_penalty_bound(model, problem, variables)
    return model, variables


def _declare(model: pulp.LpProblem, problem: Problem) -> _Variables:
    units = {
        key: model.add_variable(f"units_{key[0]}_{key[1]}_{key[2]}", 0, problem.runs[key[0]].units, pulp.LpInteger)
        for key in problem.options
    }
    several = len(problem.runs) > 1
    present = {
        (r, j): model.add_variable(f"present_{r}_{j}", cat=pulp.LpBinary)
        for r in range(len(problem.runs) if several else 0)
        for j in range(len(problem.stages))
    }
    quantized = {
        j: model.add_variable(f"quantized_{j}", cat=pulp.LpBinary)
        for j, stage in enumerate(problem.stages)
        if stage.quantized_bytes or stage.loading_quantized_bytes or stage.mixed_bytes
    }
    dense = {
        j: model.add_variable(f"dense_{j}", cat=pulp.LpBinary)
        for j, stage in enumerate(problem.stages)
        if stage.dense_bytes or stage.mixed_bytes
    }
    mixed = {
        j: model.add_variable(f"mixed_{j}", cat=pulp.LpBinary)
        for j, stage in enumerate(problem.stages)
        if stage.mixed_bytes
    }
    slowest = [model.add_variable(f"slowest_{phase}", 0) for phase in ("prefill", "decode")]
    return _Variables(units, present, quantized, dense, mixed, slowest[0], slowest[1])


def _on_stage(variables: _Variables, j: int) -> list[tuple[Key, pulp.LpVariable]]:
    return [(key, variable) for key, variable in variables.units.items() if key[1] == j]


def _add_objective(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    """Equation 4."""
    terms = []
    for (r, j, bits), variable in variables.units.items():
        prefill, decode = problem.stages[j].seconds[r][bits]
        weight = prefill + problem.sum_decode * decode + problem.theta * problem.runs[r].omega[bits]
        terms.append((variable, weight))
    constant = sum(
        prefill + problem.sum_decode * decode
        for stage in problem.stages
        for prefill, decode in (stage.fixed_seconds, stage.transfer_seconds)
    )
    slowest = [
        (variables.slowest_prefill, problem.slowest_prefill),
        (variables.slowest_decode, problem.slowest_decode),
    ]
    model += pulp.LpAffineExpression([*terms, *slowest], constant), "latency_and_quality"


def _add_every_unit_placed(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    """Equations 9-11: each unit on one stage at one bit-width."""
    for r, run in enumerate(problem.runs):
        mine = [variable for key, variable in variables.units.items() if key[0] == r]
        model += pulp.lpSum(mine) == run.units, f"run_{r}_placed"


def _add_no_empty_stage(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    for j in range(len(problem.stages)):
        mine = [variable for _, variable in _on_stage(variables, j)]
        model += pulp.lpSum(mine) >= 1, f"stage_{j}_not_empty"


def _add_order(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    """Equations 15-16: a run may not lie before its predecessor. Units of one run are interchangeable and need no order."""
    if len(problem.runs) == 1:
        return
    stages = range(len(problem.stages))
    for r, run in enumerate(problem.runs):
        for j in stages:
            mine = pulp.lpSum(variables.units[key] for key in variables.units if key[:2] == (r, j))
            row = mine == variables.present[r, j] if run.units == 1 else mine <= run.units * variables.present[r, j]
            model += row, f"run_{r}_present_on_{j}"
    single = [run.units == 1 for run in problem.runs]
    for r in range(1, len(problem.runs)):
        for j in stages[:-1]:
            later = [variables.present[r - 1, k] for k in stages[j + 1 :]]
            if single[r - 1]:  # the rows of one j in one: at most one of them can be 1
                earlier = [variables.present[r, k] for k in (stages[: j + 1] if single[r] else (j,))]
                model += pulp.lpSum(earlier + later) <= 1, f"run_{r}_up_to_{j}_after_{r - 1}"
                continue
            for k, previous in enumerate(later, j + 1):
                model += variables.present[r, j] + previous <= 1, f"run_{r}_on_{j}_not_before_{r - 1}_on_{k}"


def _add_symmetry(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    """Of equal stages that share a single run the earlier gets at least as many units at the fewest bits: swapping their
    contents changes nothing, so only one of the two splits is looked at.
    """
    if len(problem.runs) > 1:
        return
    last: dict[tuple[object, ...], int] = {}
    for j, stage in enumerate(problem.stages):
        earlier = last.get(stage.signature)
        last[stage.signature] = j
        if earlier is not None and stage.seconds[0]:
            bits = min(stage.seconds[0])
            row = variables.units[0, earlier, bits] >= variables.units[0, j, bits]
            model += row, f"stage_{earlier}_equals_{j}"


def _add_memory(model: pulp.LpProblem, problem: Problem, variables: _Variables, margin: float) -> None:
    """Equations 12-13, while serving and while loading."""
    units = sum(run.units for run in problem.runs)
    for j, stage in enumerate(problem.stages):
        mine = _on_stage(variables, j)
        serving = [(variable, stage.bytes[key[0]][key[2]] / _SCALE) for key, variable in mine]
        loading = [(variable, stage.weight_bytes[key[0]][key[2]] / _SCALE) for key, variable in mine]
        if j in variables.quantized:
            low = [variable for key, variable in mine if key[2] < 16]
            model += pulp.lpSum(low) <= units * variables.quantized[j], f"stage_{j}_quantized"
            serving.append((variables.quantized[j], stage.quantized_bytes / _SCALE))
            loading.append((variables.quantized[j], stage.loading_quantized_bytes / _SCALE))
        if j in variables.dense:
            high = [variable for key, variable in mine if key[2] >= 16]
            model += pulp.lpSum(high) <= units * variables.dense[j], f"stage_{j}_dense"
            serving.append((variables.dense[j], stage.dense_bytes / _SCALE))
        if j in variables.mixed:
            both = variables.quantized[j] + variables.dense[j] - 1
            model += variables.mixed[j] >= both, f"stage_{j}_mixed"
            serving.append((variables.mixed[j], stage.mixed_bytes / _SCALE))
        for when, used, capacity in (
            ("serving", serving, stage.capacity_bytes),
            ("loading", loading, stage.loading_capacity_bytes),
        ):
            row = pulp.LpAffineExpression(used) <= capacity / _SCALE * (1 - margin)
            model += row, f"stage_{j}_memory_{when}"


def _add_slowest_stage(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    """Equations 5-7."""
    for phase, slowest in enumerate((variables.slowest_prefill, variables.slowest_decode)):
        for j, stage in enumerate(problem.stages):
            mine = _on_stage(variables, j)
            time = pulp.LpAffineExpression([(variable, stage.seconds[key[0]][key[2]][phase]) for key, variable in mine])
            model += slowest >= time + stage.fixed_seconds[phase], f"stage_{j}_phase_{phase}_time"
            if stage.transfer_seconds[phase]:
                model += slowest >= stage.transfer_seconds[phase], f"stage_{j}_phase_{phase}_hop"


def _add_penalty_bound(model: pulp.LpProblem, problem: Problem, variables: _Variables) -> None:
    if math.isfinite(problem.penalty_bound):
        terms = [(variable, problem.runs[r].omega[bits]) for (r, _, bits), variable in variables.units.items()]
        model += pulp.LpAffineExpression(terms) <= problem.penalty_bound, "penalty_bound"


def _solution(problem: Problem, model: pulp.LpProblem, variables: _Variables) -> Solution:
    """What the solver holds, rounded. Whether its tolerances broke a constraint is the caller's to check."""
    optimal = model.sol_status == pulp.LpSolutionOptimal
    stop = StopReason.PROVED if model.status != pulp.LpStatusNotSolved else StopReason.TIME_LIMIT
    values = {key: variable.value() for key, variable in variables.units.items()}
    if model.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible} or None in values.values():
        infeasible = model.sol_status == pulp.LpSolutionInfeasible
        return Solution(SolutionStatus.INFEASIBLE if infeasible else SolutionStatus.UNKNOWN, stop)
    counts = {key: round(value) for key, value in values.items() if round(value)}
    status = SolutionStatus.OPTIMAL if optimal else SolutionStatus.FEASIBLE
    return Solution(status, stop if optimal else StopReason.TIME_LIMIT, counts, problem.objective(counts))
