"""The same request with fewer widths. What a stage holds beside its weights (kernels by number of rows, weights brought back) is charged for every
width that it may have, so that on a small device many allowed widths leave less room for layers than the few that are taken.

Asked by `search` and by `feasibility`. Where that room matters, plans of one and of two widths are searched on their own, charged for these alone.
"""

from dataclasses import replace
from itertools import combinations

from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.orders import fleet_of

MATTERS = 0.05  # of a device: on GPUs, where kernels keep nothing, it is less


def narrowings(request: PlanRequest) -> tuple[PlanRequest, ...]:
    """The request itself, then, where it matters, the request with each single width and each two of them."""
    widths = request.bits
    if request.model.quantization or len(widths) < 2 or not _matters(request):
        return (request,)
    few = [chosen for count in (1, 2) if count < len(widths) for chosen in combinations(widths, count)]
    return (request, *(replace(request, allowed_bits=chosen) for chosen in few))


def _matters(request: PlanRequest) -> bool:
    """Whether on some device the room beside weights differs much between all widths and the best one."""
    pricer = Pricer(request)
    pair = next(pricer.pairs(1))
    for members in fleet_of(request.cluster).devices:
        device = DeviceGroup(members[:1])
        rank, formats = pricer.rank(device), pricer.formats(device).values()
        if not formats:
            continue
        every = rank.working(pair, formats, head=True).serving
        least = min(rank.working(pair, [name], head=True).serving for name in formats)
        if every - least > MATTERS * device.usable_bytes:
            return True
    return False
