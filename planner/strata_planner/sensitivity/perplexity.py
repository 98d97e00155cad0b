"""Quality in perplexity: what a choice of bits costs, and how much penalty a bound allows.

Called by whoever turns `spec.objective.maxPerplexityIncrease` into a bound for the search, and by predictions. Increases are in
absolute points of perplexity on the calibration's held-back text: +0.1 lifts 19.1 to 19.2.
"""

import math
from collections.abc import Sequence

from strata_planner.errors import WorkloadError
from strata_planner.sensitivity.fit import LossFit
from strata_planner.sensitivity.table import Sensitivity


def predicted_perplexity_increase(sensitivity: Sensitivity, bits: Sequence[int]) -> float:
    """Points of perplexity more than at 16 bits, `bits` per layer. Raises WorkloadError where no losses were measured."""
    return perplexity_increase_of(sensitivity, sensitivity.total(bits))


def perplexity_increase_of(sensitivity: Sensitivity, total_omega: float) -> float:
    """The same of a sum of omega."""
    fit = _fit(sensitivity, "a perplexity cannot be predicted")
    return math.exp(fit.loss) * math.expm1(fit.increase(total_omega))


def penalty_bound(sensitivity: Sensitivity, max_increase: float) -> float:
    """The largest total omega whose predicted increase is at most `max_increase` points of perplexity.

    Raises WorkloadError where no losses were measured, or for a bound that is not above 0.
    """
    if not 0 < max_increase < math.inf:
        raise WorkloadError(
            f"maxPerplexityIncrease {max_increase}: a number above 0 is needed, in points of perplexity"
        )
    fit = _fit(sensitivity, f"maxPerplexityIncrease {max_increase:g} cannot be kept")
    return fit.largest_omega(math.log1p(max_increase / math.exp(fit.loss)))


def _fit(sensitivity: Sensitivity, what: str) -> LossFit:
    if sensitivity.fit is None:
        raise WorkloadError(
            f"{what}: no losses of this model were measured (sensitivity: {sensitivity.source}); run `strata sensitivity` "
            "on a local copy of the model, or state qualityWeight instead"
        )
    return sensitivity.fit
