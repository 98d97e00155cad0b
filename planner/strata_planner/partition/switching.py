"""Which strategy from which length on: the table that a plan gives to a tensor-parallel stage.

Called by the planner for a stage of several devices; the runtime looks a prefill step up by its tokens. Decoding always runs
Megatron (DynPart, EECS-2024-108, section 5.2): its steps have few tokens, and a second copy of a product would cost more
than the collective that it saves. The seconds decide, not the paper's two rules: those compare whole communication with
whole compute, and count no FLOPs where ProjectionReplicated gives way to WeightGathered.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from strata_planner.contract.strategies import MEGATRON_ONLY, STRATEGIES, StrategyName, StrategyTable
from strata_planner.errors import ModelError, WorkloadError
from strata_planner.partition.chain import is_gated
from strata_planner.partition.naming import find_strategies
from strata_planner.partition.seconds import Group, layer_seconds
from strata_planner.question.model import Model

_PER_OCTAVE = 8  # lengths tried between n and 2 n; the switch between two of them is then found exactly


def strategy_table(
    model: Model,
    group: Group,
    max_tokens: int,
    names: Sequence[StrategyName] = STRATEGIES,
    *,
    least_gain: float = 0.0,
) -> StrategyTable:
    """The fastest of `names` for every prefill step of 1 to `max_tokens` tokens.

    `least_gain`: share of Megatron's seconds by which another must be ahead of it. Megatron alone where layers have experts or heads that the group's degree does not divide: there is nothing to choose.
    """
    if max_tokens < 1:
        raise WorkloadError(f"a strategy table up to {max_tokens} tokens; at least 1 is needed")
    try:
        seconds_of = model_seconds(model, group)
        seconds_of("megatron", 1)
    except ModelError:
        return MEGATRON_ONLY

    def fastest(tokens: int) -> StrategyName:
        best = min(names, key=lambda name: seconds_of(name, tokens))
        ahead = seconds_of(best, tokens) <= seconds_of("megatron", tokens) * (1 - least_gain)
        return best if ahead else "megatron"

    return _switches(fastest, max_tokens)


def model_seconds(model: Model, group: Group) -> Callable[[StrategyName, int], float]:
    """Name, tokens -> seconds of all decoder layers. Raises ModelError for layers of experts."""
    layers = Counter(model.layers)
    found = {layer: find_strategies(gated=is_gated(layer)).strategies for layer in layers}

    def seconds(name: StrategyName, tokens: int) -> float:
        return sum(
            count * layer_seconds(found[layer][name], layer, model.hidden_size, group, tokens).total
            for layer, count in layers.items()
        )

    return seconds


def _switches(fastest: Callable[[int], StrategyName], max_tokens: int) -> StrategyTable:
    lengths = sorted({min(max_tokens, int(2 ** (step / _PER_OCTAVE))) for step in range(_steps(max_tokens))})
    table = [(1, fastest(1))]
    for low, high in pairwise(lengths):
        name = fastest(high)
        if name != table[-1][1]:
            table.append((_first(fastest, name, low, high), name))
    return tuple(table)


def _steps(max_tokens: int) -> int:
    return (max_tokens.bit_length() + 1) * _PER_OCTAVE + 1


def _first(fastest: Callable[[int], StrategyName], name: StrategyName, low: int, high: int) -> int:
    """The least length in (low, high] from which `name` is the fastest."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fastest(middle) == name else (middle, high)
    return high
