"""The sensitivity of a model that nobody has calibrated: a layer's share of the parameters x 4^-bits.

The error of rounding falls by four with each bit. With it, theta = 1 values the step from 16 to 8 bits for the whole model at
one second of the batch's latency, and that from 8 to 4 bits at 255.
"""

from collections.abc import Sequence

from strata_planner.question.model import Model
from strata_planner.sensitivity.table import Sensitivity

PRIOR = "prior: parameter share x 4^-bits, no calibration"
_UNIT_BITS = 8


def prior(model: Model, bits: Sequence[int]) -> Sensitivity:
    parameters = [layer.linear_parameters for layer in model.layers]
    total, prices = sum(parameters), {str(each): 4.0 ** (_UNIT_BITS - each) for each in bits}
    omega = tuple({each: own / total * price for each, price in prices.items()} for own in parameters)
    return Sensitivity(PRIOR, omega)
