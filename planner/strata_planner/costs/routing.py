"""How the tokens of a step spread over the experts of a layer: which are read at all, and how much each has to multiply.

Asked by the roofline. Routers do not deal tokens out evenly: few experts are hot, most are seldom chosen, so that a small batch reads fewer
weights than even routing would say, and a large one waits for its hot experts' products. Every device of a tensor-parallel group holds its share of
every expert, so no device has more to do than another.

ASSUMED: loads lie as the quantiles of a density x^-1.2 between 1 and 100 where a layer has more than 16 experts. aiconfigurator (NVIDIA, Apache-2.0,
docs/POWER_LAW_DISTRIBUTION.md) found that exponent to match the latency of Qwen3-235B-A22B on CNN/DailyMail and OpenOrca, and 1.01 for DeepSeek-V3,
whose router is balanced better. It counted the busiest of four devices at 1.35 times their mean for Qwen3.6-35B-A3B, nearly the same in every step.
Fewer experts are taken to be chosen evenly: Mixtral's eight lie around an eighth each on every text (arXiv 2401.04088, section 5).
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

EXPONENT = 1.2
EVEN_UP_TO = 16
HOTTEST = 100.0  # times the coldest expert's load, of infinitely many


@cache
def chances(experts: int, active: int) -> tuple[float, ...]:
    """That a token is sent to each of `experts`, hottest first, in all `active`; none is above 1."""
    if experts <= EVEN_UP_TO:
        return (active / experts,) * experts
    power = 1 - EXPONENT
    places = ((place + 0.5) / experts for place in reversed(range(experts)))
    loads = [(1 + place * (HOTTEST**power - 1)) ** (1 / power) for place in places]
    certain = 0  # the hottest, which every token is sent to
    while True:
        share = (active - certain) / sum(loads[certain:]) if certain < active else 0.0
        if share * loads[min(certain, experts - 1)] <= 1:
            return (*[1.0] * certain, *(share * load for load in loads[certain:]))
        certain += 1


@dataclass(frozen=True)
class Spread:
    """Of one step over one layer's experts, hottest first. `sent`: share of the tokens that the first n are sent, `read`: how many of them are read;
    `reuse`: tokens of an expert for each time that it is read, over the step's tokens.
    """

    sent: tuple[float, ...]
    read: tuple[float, ...]
    reuse: tuple[float, ...]

    def seconds(self, multiplying: float, reading: float, moving: float) -> float:
        """Of all experts, one after the other, each bound by its products or by its bytes: `multiplying` a step's tokens by one expert, `reading` its
        weights, `moving` the tokens' inputs and outputs.
        """
        least = reading / (multiplying - moving) if multiplying > moving else float("inf")
        bound = bisect_right(self.reuse, -least, key=lambda reuse: -reuse)  # the hot ones, by their products
        last = len(self.reuse)
        left = (self.read[last] - self.read[bound]) * reading + (self.sent[last] - self.sent[bound]) * moving
        return self.sent[bound] * multiplying + left


@lru_cache(maxsize=1024)
def spread(experts: int, active: int, tokens: int) -> Spread:
    """Of a step of `tokens` tokens, at least 1, of which each is sent to `active` of `experts`, whatever the others are sent to."""
    chosen = chances(experts, active)
    hit = [1 - (1 - chance) ** tokens for chance in chosen]
    reuse = (chance / each for chance, each in zip(chosen, hit, strict=True))
    return Spread(tuple(accumulate(chosen, initial=0.0)), tuple(accumulate(hit, initial=0.0)), tuple(reuse))
