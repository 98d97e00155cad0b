"""Which format a device stores each number of bits in, of those that the request allows.

Asked by the search, by the judge of plans, by replanning and by the assembly of a plan, which all must answer alike. Where several formats have the same bits
(8-bit activations allowed: `int8` and `w8a8`), a device takes the one that its costs say is fastest at the request's workload, so unlike
devices of one plan may store the same bits in different formats.
"""

from collections.abc import Mapping, Sequence

from strata_planner.contract.formats import FormatName
from strata_planner.costs.latency import Latencies
from strata_planner.costs.source import Rates, decode_phase, prefill_phase
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest

ABOUT_EQUAL = 1.01


def formats_on(request: PlanRequest, group: DeviceGroup) -> Mapping[int, FormatName]:
    """Bits -> format, of the allowed bits that the devices run at all."""
    profile = group.leader.profile
    profiles = [each.profile for each in group.devices] if group.shares else [profile]
    runs = set.intersection(*({*each.decode_efficiency} & {*each.prefill_efficiency} for each in profiles))
    rates = Rates(profile, request.compute_type, request.kv_bits, group.leader.name)
    able = {bits: [name for name in request.formats[bits] if name in runs] for bits in request.bits}
    return {bits: _fastest(request, names, rates) for bits, names in able.items() if names}


def _fastest(request: PlanRequest, names: Sequence[FormatName], rates: Rates) -> FormatName:
    """The first of those about as fast. Whole batches in both phases, one layer: what a plan weighs (LLM-PQ, section 4.1)."""
    if len(names) == 1:
        return names[0]
    workload, layer = request.workload, request.model.layers[0]
    latencies = Latencies(request.latency_sources)
    prefill, decode = prefill_phase(workload, 1), decode_phase(workload, workload.concurrency)

    def seconds(name: FormatName) -> float:
        prompts = workload.concurrency * latencies.layer(layer, name, rates, prefill).seconds
        return prompts + (workload.output_tokens - 1) * latencies.layer(layer, name, rates, decode).seconds

    taken = {name: seconds(name) for name in names}
    return next(name for name in names if taken[name] <= ABOUT_EQUAL * min(taken.values()))
