"""What lowering a layer's precision costs in quality: omega per layer and bits, summed and weighed by theta.

Read by the search and by predictions. Three sources: a calibration of the model's own weights and a text (`indicators`
turn its statistics into omega), a file with any table, or the `prior`, and every plan says which. All but a file's are in
one unit: the whole model at 8 bits is 1, so theta keeps its meaning from one model and source to the next.
"""

from strata_planner.sensitivity.perplexity import penalty_bound, perplexity_increase_of, predicted_perplexity_increase
from strata_planner.sensitivity.table import Sensitivity, check_shapes
from strata_planner.sensitivity.uncalibrated import PRIOR, prior

__all__ = [
    "PRIOR",
    "Sensitivity",
    "check_shapes",
    "penalty_bound",
    "perplexity_increase_of",
    "predicted_perplexity_increase",
    "prior",
]
