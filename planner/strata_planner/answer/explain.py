"""A plan as people read it: a table of stages, the prediction, what bound it and how it was found.

Called by `strata plan`, `strata up`, the demo and the benchmarks, which print what these functions return.
"""

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata_planner.answer.shadows import shadow_table
from strata_planner.answer.speculation import forecast_lines
from strata_planner.answer.standing_orders import order_table
from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.judged import Stated
from strata_planner.contract.moves import why_never
from strata_planner.contract.plan import Plan, Prediction, Replica, Stage
from strata_planner.contract.roles import roles_of
from strata_planner.contract.shares import lowest, told
from strata_planner.search.exact.search import SearchStats
from strata_planner.search.planning import PlanOutcome
from strata_planner.units import human_bytes

_MOST_NAMES = 4  # of nodes in a line


def render_plan(plan: Plan, outcome: PlanOutcome | None = None) -> RenderableType:
    """Everything a person needs to judge the plan; with the outcome also how it was found."""
    parts: list[RenderableType] = [stage_table(plan), *map(Text, [*summary_lines(plan), *forecast_lines(plan)])]
    if outcome is not None:
        parts += [Text(search_line(outcome.stats)), *(Text(f"note: {note}") for note in outcome.notes)]
    if plan.shadows:
        parts.append(shadow_table(plan))
    if plan.orders:
        parts.append(order_table(plan))
    parts += map(Text, unused_lines(plan))
    if plan.alternatives:
        parts.append(alternatives_table(plan))
    return Group(*parts)


def stage_table(plan: Plan) -> Table:
    """A row per stage of every replica."""
    table = Table(title=f"{plan.architecture}, {plan.num_layers} layers, {plan.compute_type}", title_justify="left")
    table.add_column("stage", justify="right")
    for column in ("device", "node", "layers", "bits"):
        table.add_column(column)
    for column in ("memory of usable", "KV tokens", "step with prompts ms", "decode ms"):
        table.add_column(column, justify="right")
    table.caption = "\n".join([f"weights: {formats_summary(plan)}", *(f"times: {source}" for source in sources(plan))])
    table.caption_justify = "left"
    several = len(plan.replicas) > 1
    for replica in plan.replicas:
        for stage in replica.stages:
            number = f"{replica.replica}.{stage.stage}" if several else str(stage.stage)
            table.add_row(number, *_cells(plan, stage))
    return table


def alternatives_table(plan: Plan) -> Table:
    """What else was possible, and why it was not taken, beside the plan: all by the goal's own number, in one unit."""
    table = Table(title="alternatives", title_justify="left")
    mine = plan.objective
    table.add_column("plan")
    table.add_column("by the goal" if mine is None else mine.unit.partition(", ")[0], justify="right")
    table.add_column("first token", justify="right")
    table.add_column("not taken because", overflow="fold")
    if mine is not None:
        table.add_row("this plan", _number(mine, mine.value), _first_token(plan.prediction), "")
        table.caption, table.caption_justify = f"{mine.unit}: {mine.better} is better", "left"
    for each in plan.alternatives:
        table.add_row(each.summary, _number(mine, each.value), _first_token(each.prediction), each.rejected_because)
    return table


def _number(stated: Stated | None, value: float | None) -> str:
    """Without the unit, which stands above it."""
    return "-" if stated is None or value is None else stated.said(value).removesuffix(f" {stated.unit}")


def _first_token(told: Prediction | None) -> str:
    return "-" if told is None else f"{told.ttft_ms:.4g} ms"


def _cells(plan: Plan, stage: Stage) -> tuple[str, ...]:
    parts = "".join(f" + {name}" for name, here in (("embedding", stage.embedding), ("head", stage.head)) if here)
    memory, device = stage.fullest
    types = "+".join(dict.fromkeys(device.type for device in stage.devices))
    indices = ",".join(str(device.index) for device in stage.devices)
    shares = f" ({told(stage.shares)})" if lowest(stage.shares) else ""
    return (
        f"{f'{stage.tensor_parallel} x ' * (stage.tensor_parallel > 1)}{types} #{indices}{shares}",
        stage.node,
        f"{stage.layers[0]}-{stage.layers[1]} ({len(stage.bits)}){parts}",
        bits_summary(stage.bits),
        f"{human_bytes(memory.total_bytes)} of {human_bytes(device.usable_bytes)} ({memory.total_bytes / device.usable_bytes:.0%})",
        f"{stage.kv_page_budget * plan.page_tokens:,}",
        f"{stage.times.prefill_seconds * 1e3:.4g}",
        f"{stage.times.decode_seconds * 1e3:.4g}",
    )


def sources(plan: Plan) -> list[str]:
    """Where predicted times are from."""
    return list(dict.fromkeys(stage.times.source for stage in plan.stages))


def bits_summary(bits: tuple[int, ...]) -> str:
    """How many layers at how many bits, for instance "8x16 4x8"."""
    return " ".join(f"{count}x{each}" for each, count in sorted(Counter(bits).items(), reverse=True))


def formats_summary(plan: Plan) -> str:
    """How many layers in which format, finest first, and the KV cache's bits where they are fewer than 16."""
    names = Counter(name for stage in plan.stages for name in stage.format)
    parts = [f"{count}x{name}" for name, count in sorted(names.items(), key=lambda each: -BITS_OF_FORMAT[each[0]])]
    kv_bits = sorted({stage.kv_bits for stage in plan.stages if stage.kv_bits < 16})
    return " ".join(parts) + "".join(f"; keys and values: {bits} bits" for bits in kv_bits)


def summary_lines(plan: Plan) -> list[str]:
    predicted = plan.prediction
    return [
        (
            f"predicted: {predicted.tokens_per_second:.4g} tokens/s, first token {predicted.ttft_ms:.4g} ms, "
            f"then {predicted.tpot_ms:.4g} ms per token, while {_in_flight(plan)}"
        ),
        (
            f"whole batch: {predicted.latency_seconds:.4g} s (LLM-PQ's objective); "
            f"quality penalty {predicted.quality_penalty:.4g}{_in_perplexity(plan)}"
        ),
        *first_token_lines(plan),
        *objective_lines(plan),
        *bound_lines(plan),
        *(_micro_batches(plan, replica) for replica in plan.replicas),
        f"bound by: {predicted.bound_by}",
        *loss_lines(plan),
    ]


def loss_lines(plan: Plan) -> list[str]:
    """What a change of plan costs beside its layers: who keeps no KV over it, and what stages keep for those who lose theirs."""
    whys = {role.replica: why for roles in roles_of(plan).values() for role in roles if (why := why_never(role))}
    emptied = [
        f"a change of plan has all KV of replica {', '.join(map(str, numbers))} computed again: {why}"
        for why in dict.fromkeys(whys.values())
        if (numbers := sorted(replica for replica, other in whys.items() if other == why))
    ]
    return [*emptied, *_log_lines(plan)]


def _log_lines(plan: Plan) -> list[str]:
    pages = [role.logged_pages for roles in roles_of(plan).values() for role in roles if role.logged_pages]
    if not pages:
        return []
    tokens = f"{max(pages) * plan.page_tokens:,} tokens"
    return [
        f"boundary log: {len(pages)} of {len(plan.stages)} stages keep what they hand on in host memory, of up to {tokens} each"
    ]


def first_token_lines(plan: Plan) -> list[str]:
    """What users see, and of which requests that is."""
    told = plan.prediction.arrivals
    if told is None:
        return []
    rate = told.requests_per_second
    come = "each as another ends" if rate is None else f"at random, {rate:.4g} requests a second"
    if told.ttft_ms is None or told.ttft_p90_ms is None:
        most = f"{told.most_requests_per_second:.4g} that are answered"
        grows = "the queue grows, and so does the time to the first token; plan with more devices, or for fewer"
        return [f"{come}, are too many for the {most}: {grows}"]
    share = "" if rate is None else f", {rate / told.most_requests_per_second:.0%} of what is answered at most"
    later = "" if told.tpot_ms is None else f", then {told.tpot_ms:.4g} ms per token"
    first = f"first token {told.ttft_ms:.4g} ms in the mean, {told.ttft_p90_ms:.4g} ms or more for one in ten"
    asked = "; for requests that come at random give workload.requestsPerSecond" if rate is None else ""
    return [f"simulated, {come}{share}: {first}{later} ({told.simulated_requests} requests){asked}"]


def objective_lines(plan: Plan) -> list[str]:
    """The number that plans are compared by."""
    return (
        [] if plan.objective is None else [f"by the goal: {plan.objective.said()}, {plan.objective.better} is better"]
    )


def bound_lines(plan: Plan) -> list[str]:
    """How far it is from the best, of what a search has found."""
    if plan.search is None or plan.objective is None:
        return []
    mine, bound = plan.objective, plan.search.bound
    if bound is None:
        return ["how far it is from the best plan is unknown"]
    best = f"no plan is better than {mine.said(bound).partition(', ')[0]}"
    if not mine.value:
        return [best]
    return [f"{best}: the best is better by {abs(bound - mine.value) / mine.value:.1%} at most"]


def _in_flight(plan: Plan) -> str:
    count = sum(replica.concurrency for replica in plan.replicas)
    return (
        f"{count} requests are in flight and each is followed by the next"
        if count > 1
        else "one request follows the other"
    )


def unused_lines(plan: Plan) -> list[str]:
    """Which devices serve nothing, and why."""
    return [f"unused: {each.count} x {each.type} on {_some(each.nodes)}: {each.reason}" for each in plan.unused]


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _in_perplexity(plan: Plan) -> str:
    increase = plan.prediction.perplexity_increase
    return "" if increase is None else f", perplexity +{increase:.3g} (predicted from calibration)"


def _micro_batches(plan: Plan, replica: Replica) -> str:
    batch, several = replica.micro_batch, len(plan.replicas) > 1
    where = f"replica {replica.replica}, {replica.concurrency} sequences in flight: " if several else ""
    count = batch.under_way(len(replica.stages))
    under_way = f"{count} steps under way, " if count > 1 else ""
    chunk = batch.max_step_tokens - batch.decode
    return f"{where}{under_way}each of at most {batch.decode} decoding sequences and {chunk} tokens of prompts"


def search_line(stats: SearchStats) -> str:
    return (
        f"search: {stats.status.value} in {stats.seconds:.2f} s ({stats.stop.value}); {stats.orders} device orders, "
        f"{stats.candidates} candidates, {stats.pruned} pruned, {stats.solved} solved"
    )
