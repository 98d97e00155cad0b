"""Indicators: from the statistics of a layer to omega, the penalty of storing it at each number of bits.

Called by `Sensitivity.from_statistics`. Sums over the linears o of a layer:

| indicator       | omega of the layer at b bits                       | source                                               |
|-----------------|----------------------------------------------------|------------------------------------------------------|
| `deterministic` | sum D_Wo * S_Wo(b)^2 * Var[X_o] / 4                | LLM-PQ (arXiv 2403.01136), Proposition 2             |
| `stochastic`    | sum D_Wo * S_Wo(b)^2 * (E[X_o]^2 + Var[X_o]) / 6   | the same, for stochastic rounding                    |
| `deviation`     | sum E[|dy_o|^2 / |y|^2]                            | ours: y the layer's output, dy_o its change by o alone |

D_W: values of the weight; S_W(b): the step between two of its quantized values. The paper has one step per matrix, from its extremes,
asymmetric or symmetric; the runtime's formats store one per group (3 and 4 bits, asymmetric) or per output (8 bits, symmetric). For
these S^2 is the mean over groups or outputs: the rounding errors add up in squares, and all groups of a matrix are of one size.
"""

from collections.abc import Callable
from typing import Literal

from strata_planner.contract.calibration import LayerStatistics, LinearStatistics

IndicatorName = Literal["deviation", "deterministic", "stochastic"]
Rounding = Literal["deterministic", "stochastic"]
Steps = Literal["stored", "asymmetric", "symmetric"]
Omega = dict[str, float]

DEFAULT_INDICATOR: IndicatorName = "deviation"
BITS = (3, 4, 8)
_GROUPED_BITS = (3, 4)


def step_square(linear: LinearStatistics, bits: int, steps: Steps = "stored") -> float:
    """S_W(b)^2: of the runtime's own format, or with one step for the whole matrix as in the paper (below equation 3)."""
    if steps == "asymmetric":
        return float((linear.weight_max - linear.weight_min) / (2**bits - 1)) ** 2
    if steps == "symmetric":
        return float(max(abs(linear.weight_max), abs(linear.weight_min)) / (2 ** (bits - 1) - 1)) ** 2
    if bits in _GROUPED_BITS:
        return linear.group_range_square / float(2**bits - 1) ** 2
    return linear.channel_peak_square / float(2 ** (bits - 1) - 1) ** 2


def variance(linear: LinearStatistics, bits: int, rounding: Rounding, steps: Steps = "stored") -> float:
    """D_W * S_W(b)^2 * G(X): the variance that rounding the weight adds to the linear's output (Proposition 2)."""
    mean, spread = linear.input_mean, linear.input_variance
    moment = spread / 4 if rounding == "deterministic" else (mean * mean + spread) / 6
    return linear.out_features * linear.in_features * step_square(linear, bits, steps) * moment


def _variance_of(rounding: Rounding) -> Callable[[LayerStatistics], Omega]:
    def omega(layer: LayerStatistics) -> Omega:
        return {str(bits): sum(variance(each, bits, rounding) for each in layer.linears) for bits in BITS}

    return omega


def deviation(layer: LayerStatistics) -> Omega:
    """How far the layer's output moves, relative to its size: the residual stream that later layers read is normalised.

    Against the variance indicator it knows what an error passes on its way out of the layer (attention, gate, projection), that
    features differ in size, and that the same error weighs less in a larger residual stream.
    """
    return {str(bits): sum(each.deviation[str(bits)] for each in layer.linears) for bits in BITS}


INDICATORS: dict[IndicatorName, Callable[[LayerStatistics], Omega]] = {
    "deviation": deviation,
    "deterministic": _variance_of("deterministic"),
    "stochastic": _variance_of("stochastic"),
}
