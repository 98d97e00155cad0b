"""Which shares are worth a try for a group of unlike devices. Called by `pipelines`, once for devices of each kind.

Whole heads come out unevenly, what a layer takes beside its products is the same for all, and devices that are fast need not be large: so shares in small
numbers are all looked at, each by what a layer takes on the slowest device and by how full the fullest one is, and few are kept.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import gcd

from strata_planner.contract.shares import Shares, equal, lowest
from strata_planner.costs.shards import Portion, portion_of
from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.search.layouts.stages import CHUNKS, Split, Stages, pair_of

_LARGEST = {2: 12, 3: 5}  # number of a share, by how many unlike devices there are
_LARGEST_OF_MANY = 3


def worth_a_try(stages: Stages, devices: Sequence[Accelerator], classes: Sequence[int]) -> tuple[Shares, ...]:
    """`classes`: equal for equal devices, which have equal shares. The quickest for a lone request, and for all at once; with the most room; between
    those two; and equal ones. Told of equal ones too. The first come first where they are as good.
    """
    bits = min(stages.request.bits)
    layer = max(stages.request.model.layers, key=lambda each: each.parameters)

    @cache
    def seconds(shares: Shares, rung: int) -> float:
        """Of all requests in flight, at the fewest bits that the devices run."""
        pricer = stages.pricers[rung]
        pair = pair_of(pricer.request, Split(1, CHUNKS[-1]), 1)
        found = pricer.priced(DeviceGroup(tuple(devices), shares)).layers(pair)
        if not found:
            return 0.0
        prompts, decode = found.get(bits) or found[min(found)]
        load = pricer.request.workload
        return load.output_tokens * decode + load.concurrency * pricer.prompts(pair).steps / pair.prefill * prompts

    def fullness(shares: Shares) -> float:
        return max(
            portion_of(layer, Portion(shares, rank)).parameters / device.usable_bytes
            for rank, device in enumerate(devices)
        )

    last = len(stages.rungs) - 1
    tried = shares_of(classes)
    least_seconds, least_fullness = min(seconds(each, last) for each in tried), min(map(fullness, tried))

    def both(shares: Shares) -> float:
        return seconds(shares, last) * least_fullness + fullness(shares) * least_seconds

    judges: tuple[Callable[[Shares], float], ...] = (
        lambda shares: seconds(shares, 0),
        lambda shares: seconds(shares, last),
        fullness,
        both,
    )
    return tuple(dict.fromkeys((*(min(tried, key=judge) for judge in judges), equal(len(devices)))))


def shares_of(classes: Sequence[int]) -> tuple[Shares, ...]:
    """All in small numbers, the same for devices of one class, those with the smallest numbers first."""
    unlike = list(dict.fromkeys(classes))
    most = _LARGEST.get(len(unlike), _LARGEST_OF_MANY)
    ways = (each for each in product(range(1, most + 1), repeat=len(unlike)) if gcd(*each) == 1)
    found = (tuple(way[unlike.index(c)] for c in classes) for way in ways)
    told = {lowest(each) or equal(len(each)) for each in found}
    return tuple(sorted(told, key=lambda each: (sum(each), each)))
