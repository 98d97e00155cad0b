"""Whether anything fits, by how much it does not, and the smallest change that would: the reasons of an InfeasibleError.

Called by `search` (a first plan) and by `planning` when the search found nothing. Every suggestion has been tried: a plan
at the fewest bits exists with it.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import msgspec

from strata_planner.contract.formats import FORMATS_OF_METHOD, Method
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.bounds import least_bytes
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.orders import Fleet, Order, fleet_of, orders
from strata_planner.search.exact.penalty import least_penalty
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import Counts, Problem
from strata_planner.search.exact.widths import narrowings
from strata_planner.units import human_bytes

_ORDERS_TRIED = 200
_MOST_ADDED_DEVICES = 8


def at_fewest_bits(problem: Problem) -> Counts | None:
    """Units in order, each at the fewest bits its stage has, every stage as full as memory allows; None: they do not fit."""
    counts: Counts = {}
    queue = [r for r, run in enumerate(problem.runs) for _ in range(run.units)]
    for j in range(len(problem.stages)):
        reserve = len(problem.stages) - j - 1  # one unit for each later stage
        placed = _fill(problem, j, queue[: max(len(queue) - reserve, 0)], counts)
        if not placed:
            return None
        queue = queue[placed:]
    return {key: count for key, count in counts.items() if count} if not queue else None


def _fill(problem: Problem, j: int, queue: list[int], counts: Counts) -> int:
    """Put units of `queue` on stage j until it is full; how many went."""
    for placed, r in enumerate(queue):
        if not problem.stages[j].seconds[r]:
            return placed
        key = (r, j, min(problem.stages[j].seconds[r]))
        counts[key] = counts.get(key, 0) + 1
        if problem.free_bytes(counts, j) < 0:
            counts[key] -= 1
            return placed
    return len(queue)


def reasons(request: PlanRequest) -> list[str]:
    """Sentences that say what is missing and what would fit."""
    fleet = fleet_of(request.cluster)
    if not fleet.size:
        return ["no device has usable memory: give the cluster devices, or lower what the framework takes of them"]
    if fleet.size < request.min_stages:
        return [
            f"minStages {request.min_stages}: the cluster has {fleet.size} usable devices; add devices or ask for fewer"
        ]
    unable = _without_formats(request, fleet) or _beyond_penalty_bound(request)
    if unable:
        return [unable]
    return [f"{_shortage(request, fleet)}; {_remedies(request)}"]


def _without_formats(request: PlanRequest, fleet: Fleet) -> str:
    formats = {name for names in request.formats.values() for name in names}
    profiles = [members[0].profile for members in fleet.devices]
    if any(formats & profile.decode_efficiency.keys() for profile in profiles):
        return ""
    types = ", ".join(sorted({profile.type for profile in profiles}))
    return f"no device ({types}) runs any of the allowed bits {list(request.bits)}: allow 16"


def _beyond_penalty_bound(request: PlanRequest) -> str:
    """Where memory suffices, but not for the quality that is asked for."""
    if request.penalty_bound is None or not fits(request):
        return ""
    known = [found for each in narrowings(request) if (found := least_penalty(each)) is not None]
    needed = min(known, default=None)
    least = "" if needed is None else f"; the least that fits is {needed:.6g}"
    return f"no plan that fits has a quality penalty of at most {request.penalty_bound:g}{least}: ask for that, or add memory"


def _shortage(request: PlanRequest, fleet: Fleet) -> str:
    devices = [each for members in fleet.devices for each in members]
    stages = min(len(devices), request.max_stages or len(devices))
    (needed, bits), usable = needed_bytes(request, stages), sum(each.usable_bytes for each in devices)
    if stages < len(devices):
        usable = sum(sorted((each.usable_bytes for each in devices), reverse=True)[:stages])
    where = f"{stages} device{'s' * (stages > 1)}"
    if stages < len(devices):
        where = f"the largest {where} (maxStages {request.max_stages})"
    text = f"needs {human_bytes(needed)} at {bits} bits; the cluster has {human_bytes(usable)} usable on {where}"
    return text if needed > usable else f"{text}, but whole layers do not fit into the devices one by one"


def needed_bytes(request: PlanRequest, stages: int = 1) -> tuple[int, int]:
    """Of the whole model with its KV, with what each of `stages` stages needs beside, and the bits at which that is least."""
    return min((_needed_bytes(each, stages), min(each.bits)) for each in narrowings(request))


def _needed_bytes(request: PlanRequest, stages: int) -> int:
    pricer = Pricer(request)
    device = DeviceGroup(request.cluster.accelerators()[:1])
    one, inner = (
        pricer.problem(Candidate((device,) * count, Pair(1, request.workload.concurrency))) for count in (1, 3)
    )
    low = min(request.bits) < 16
    fixed = [
        device.usable_bytes - stage.capacity_bytes + (stage.quantized_bytes if low else stage.dense_bytes)
        for stage in (one.stages[0], inner.stages[1])
    ]
    return fixed[0] + (stages - 1) * fixed[1] + least_bytes(one)


def fits(request: PlanRequest) -> bool:
    """Whether some device order holds the model at the fewest of some widths. Sound, not complete on large fleets."""
    return any(
        _holds(pricer, order)
        for pricer in map(Pricer, narrowings(request))
        if not _is_beyond_all(pricer)
        for order in islice(_longest_first(request), _ORDERS_TRIED)
    )


def _is_beyond_all(pricer: Pricer) -> bool:
    """Whether the layers take more than all devices have beside the least that any stage needs: no order needs to be tried."""
    room: list[int] = []
    least: list[int] = []
    for members in fleet_of(pricer.request.cluster).devices:
        problem = pricer.problem(Candidate((DeviceGroup(members[:1]),) * 3, Pair(1, 1)))
        room += [max(0, problem.stages[1].capacity_bytes)] * len(members)  # the ends need more
        least.append(least_bytes(problem))
    return sum(sorted(room, reverse=True)[: pricer.request.max_stages or None]) < min(least)


def _longest_first(request: PlanRequest) -> list[Order]:
    fleet = fleet_of(request.cluster)
    most = min(fleet.size, request.model.num_layers, request.max_stages or fleet.size)
    return list(islice(orders(fleet, range(most, request.min_stages - 1, -1)), _ORDERS_TRIED))


def _holds(pricer: Pricer, order: Order) -> bool:
    batch = pricer.request.workload.concurrency
    candidate = Candidate(order, Pair(1, -(-batch // len(order))))
    return at_fewest_bits(pricer.problem(candidate)) is not None


def _remedies(request: PlanRequest) -> str:
    found = [
        each
        for each in (
            _more_devices(request),
            _fewer_bits(request),
            _shorter(request),
            _narrower(request),
        )
        if each
    ]
    if not found:
        return f"no single change fits: neither {_MOST_ADDED_DEVICES} more devices of a type nor a smaller load does"
    return f"smallest change that fits: {', or '.join(found)}"


def _more_devices(request: PlanRequest) -> str:
    """The fewest more devices of one type of the cluster."""
    kinds = {(each.type, each.memory_bytes): each for node in request.cluster.nodes for each in node.devices}
    for count in range(1, _MOST_ADDED_DEVICES + 1):
        for (name, _), device in sorted(kinds.items()):
            if fits(replace(request, cluster=_with_more(request.cluster, device, count))):
                return f"{count} more {name}"
    return ""


def _with_more(cluster: Cluster, device: Device, count: int) -> Cluster:
    extra = Node("one more", (msgspec.structs.replace(device, count=count),))
    return msgspec.structs.replace(cluster, nodes=(*cluster.nodes, extra))


def _fewer_bits(request: PlanRequest) -> str:
    quantizable = all(linear.quantizable for layer in set(request.model.layers) for linear in layer.linears)
    for method, bits in _lower(request) if quantizable else ():
        if fits(replace(request, method=method, allowed_bits=(*request.allowed_bits, bits), sensitivity=None)):
            return f"allow {bits} bits" + (f" with the method {method}" if method != request.method else "")
    return ""


def _lower(request: PlanRequest) -> list[tuple[Method, int]]:
    """Widths below the allowed ones, the widest first: of the request's method, then of those that go lower."""
    lowest = min(request.bits)
    found: list[tuple[Method, int]] = []
    for method in sorted(FORMATS_OF_METHOD, key=lambda each: each != request.method):
        below = sorted((bits for bits in FORMATS_OF_METHOD[method] if bits < lowest), reverse=True)
        if set(request.allowed_bits) <= FORMATS_OF_METHOD[method].keys():
            found += [(method, bits) for bits in below]
            lowest = min([lowest, *below])
    return found


def _shorter(request: PlanRequest) -> str:
    """The longest maxModelLen that fits, if shortening it helps at all."""
    low = request.workload.prompt_tokens + 1
    longest = _largest(low, request.max_model_len, lambda value: fits(replace(request, max_model_len=value)))
    return f"maxModelLen <= {longest}" if longest else ""


def _narrower(request: PlanRequest) -> str:
    load = request.workload

    def holds(value: int) -> bool:
        workload = msgspec.structs.replace(load, concurrency=value)
        return fits(replace(request, workload=workload))

    widest = _largest(1, load.concurrency, holds)
    return f"concurrency <= {widest}" if widest else ""


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest value in [low, high) that holds, given that all smaller ones do too; 0 if `low` does not."""
    if low >= high or not holds(low):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
