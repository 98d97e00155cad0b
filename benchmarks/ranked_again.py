"""Whether plans should be ranked again by the simulator: would the plan that it likes best be another one than the formula's, and how much better?

`python -m benchmarks.ranked_again [--json FILE] [--fleets 16] [--only NUMBER] [--quick]`. For each random fleet of `benchmarks.fleets` some twenty plans of
different shape: of other seeds, numbers of stages and replicas, chunks and widths. Each is simulated in closed loop (warm-up left out), by three
seeds: one to choose by, two to judge with. Values are by the fleet's own goal, from simulated tokens/s and times of a token; nothing is timed.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from rich.progress import track

from benchmarks.fleets import Fleet, fleets
from benchmarks.rows import Row, run
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.plan import Plan, Replica
from strata_planner.costs.latency import Latencies
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.search import Wish, best_layout, layout_plan
from strata_planner.search.metric import gain, value_of_plan
from strata_planner.search.planning import make_plan
from strata_planner.simulate import ReplicaModel, fleet, of_clients, simulate

MOST = 20  # plans of a fleet
SEEDS = (1, 2, 3)
WAVES = 3  # requests of each client
FEWEST = 64  # requests: few of few clients would tell chance alone
CHUNKS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Ranked:
    """Of one fleet. `gained`: by the simulator's choice over the formula's, judged by other seeds; `noise`: how far these are apart."""

    plans: int
    gained: float
    noise: float
    disordered: float  # the share of pairs, apart by more than noise, that simulator and formula order differently


def candidates(request: PlanRequest) -> list[Plan]:
    """Best first by the formula. Raises InfeasibleError where nothing fits."""
    found = [with_alternatives(request, make_plan(request)).plan]
    stages, replicas = len(found[0].replicas[0].stages), len(found[0].replicas)
    variants = [replace(request, chunk_tokens=chunk) for chunk in CHUNKS]
    variants += [replace(request, min_stages=1, max_stages=most) for most in (1, 2, stages - 1, 2 * stages) if most > 0]
    variants += [replace(request, max_replicas=most) for most in (1, 2, replicas - 1, replicas // 2) if most > 0]
    variants += [replace(request, allowed_bits=(bits,)) for bits in request.bits if len(request.bits) > 1]
    for each in variants:
        try:
            found.append(make_plan(each, quick=True).plan)
        except PlannerError:
            continue
    found += [layout_plan(best_layout(request, Wish(seconds=2.0, seed=seed, thorough=False))) for seed in range(1, 6)]
    unlike = {str([(_shape(each)) for each in plan.replicas]): plan for plan in reversed(found)}
    return sorted(unlike.values(), key=lambda plan: -value_of_plan(request, plan))[:MOST]


def _shape(replica: Replica) -> object:
    stages = [(stage.devices[0].type, stage.tensor_parallel, stage.layers, stage.bits) for stage in replica.stages]
    return stages, replica.concurrency, replica.micro_batch


def simulated(request: PlanRequest, plan: Plan, seed: int) -> float:
    """Its value as the simulator has it: a closed loop for each replica, alike ones once."""
    load, known = request.workload, dict[str, tuple[float, float, float]]()
    models = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    told = []
    for replica, model in zip(plan.replicas, models, strict=True):
        key = str((_shape(replica), [stage.node for stage in replica.stages]))
        if key not in known:
            known[key] = _closed_loop(model, replica.concurrency, (load.prompt_tokens, load.output_tokens), seed)
        told.append((replica.concurrency, *known[key]))
    clients = sum(count for count, *_ in told)
    prediction = msgspec.structs.replace(
        plan.prediction,
        tokens_per_second=sum(rate for _, rate, _, _ in told),
        ttft_ms=sum(count * first for count, _, first, _ in told) / clients * 1e3,
        tpot_ms=sum(count * each for count, _, _, each in told) / clients * 1e3,
    )
    return value_of_plan(request, msgspec.structs.replace(plan, prediction=prediction))


def _closed_loop(model: ReplicaModel, clients: int, lengths: tuple[int, int], seed: int) -> tuple[float, float, float]:
    """Tokens a second, seconds to the first token and between tokens."""
    trace = of_clients(clients, max(WAVES * clients, FEWEST) + 8, *lengths, seed, model.limits.most_tokens)
    outcome = simulate([model], trace, in_flight=clients)
    later = [each for each in outcome.requests[clients:] if each.tpot_seconds is not None]
    first = statistics.mean(each.ttft_seconds or 0.0 for each in later)
    return outcome.steady_tokens_per_second(clients), first, statistics.mean(each.tpot_seconds or 0.0 for each in later)


def ranked(fleet_: Fleet) -> Ranked | None:
    """None where nothing holds the model."""
    request = replace(fleet_.request, time_limit_seconds=10.0)
    try:
        plans = candidates(request)
    except InfeasibleError:
        return None
    values = [[simulated(request, plan, seed) for seed in SEEDS] for plan in plans]
    judged = [statistics.mean(each[1:]) for each in values]
    noise = statistics.mean(abs(gain(each[1], each[2])) for each in values)
    chosen = max(range(len(plans)), key=lambda place: values[place][0])
    pairs = [gain(below, above) for place, above in enumerate(judged) for below in judged[place + 1 :]]
    apart = [each for each in pairs if abs(each) > max(noise, 0.01)]
    wrong = sum(each > 0 for each in apart) / len(apart) if apart else 0.0
    return Ranked(len(plans), gain(judged[chosen], judged[0]), noise, wrong)


def measure(count: int, only: int | None) -> Iterator[Row]:
    asked = [each for each in fleets(count) if only in (None, each.number)]
    found = [(each, one) for each in track(asked, description="fleets") if (one := ranked(each)) is not None]
    most, where = max((one.gained, each.number) for each, one in found)
    yield Row("ranked_again_gain_mean", statistics.mean(one.gained for _, one in found), f"of {len(found)} fleets")
    yield Row("ranked_again_gain_most", most, f"fleet {where}")
    yield Row("ranked_again_noise", statistics.mean(one.noise for _, one in found), "between two seeds of one plan")
    yield Row("ranked_again_disordered", statistics.mean(one.disordered for _, one in found), "of pairs of plans")
    yield Row("ranked_again_plans", statistics.mean(one.plans for _, one in found), "plans a fleet")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--fleets", type=int, default=16)
    parser.add_argument("--only", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="the first two fleets")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("ranked_again", lambda: list(measure(2 if chosen.quick else chosen.fleets, chosen.only)), rest)


if __name__ == "__main__":
    main()
