"""Non-negative least squares on relative errors, and how well a fit tells points that it has not seen.

Used by `fitted`. Knows no phases and no kernels: matrices in, coefficients out.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_TOLERANCE = 1e-9


def relative_fit(features: Array, seconds: Array) -> Array:
    """Coefficients >= 0 with the least squared relative error. features: [points, terms]; seconds: [points], above 0."""
    return nonnegative(features / seconds[:, None], np.ones(len(seconds)))


def nonnegative(matrix: Array, target: Array) -> Array:
    """argmin over x >= 0 of |matrix x - target| (Lawson and Hanson 1974, chapter 23), columns scaled to equal size."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    scaled = matrix / scale
    count = matrix.shape[1]
    passive = np.zeros(count, dtype=bool)
    solution = np.zeros(count)
    for _ in range(3 * count):  # each round adds the most promising coefficient; far fewer are needed
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= _TOLERANCE:
            break
        passive[best] = True
        solution = _inside(scaled, target, passive, solution)
    result: Array = solution / scale
    return result


def _inside(matrix: Array, target: Array, passive: npt.NDArray[np.bool_], solution: Array) -> Array:
    """The least squares over the passive coefficients; those that would turn negative leave `passive` on the way there."""
    while True:
        wanted = np.zeros_like(solution)
        wanted[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        negative = passive & (wanted <= 0)
        if not negative.any():
            return wanted
        share = min(solution[negative] / (solution[negative] - wanted[negative]))
        solution = solution + share * (wanted - solution)
        passive &= solution > _TOLERANCE
        solution[~passive] = 0


def hats(values: Array, knots: Array) -> Array:
    """[points, knots]: weights of the knots beside each value, so that coefficients are what the fit is worth at the knots.

    Beyond the ends the line through the last two knots goes on.
    """
    if len(knots) == 1:
        return np.ones((len(values), 1))
    left = np.clip(np.searchsorted(knots, values, side="right") - 1, 0, len(knots) - 2)
    share = (values - knots[left]) / (knots[left + 1] - knots[left])
    weights = np.zeros((len(values), len(knots)))
    at = np.arange(len(values))
    weights[at, left], weights[at, left + 1] = 1 - share, share
    return weights
