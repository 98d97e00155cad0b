"""From total omega to the model's loss: a monotone curve through the losses that a calibration measured.

Made by `Sensitivity.from_statistics`, read by `perplexity`. Three curves through the origin are tried and the one that best predicts each
measured point from the others is kept; losses within two standard errors of none tell nothing and are left out.
"""

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from strata_planner.contract.values import Value

Point = tuple[float, float, float]  # total omega, increase of the loss, its standard error
CurveName = Literal["proportional", "power", "isotonic"]
_STANDARD_ERRORS = 2.0
_WORTH_A_PARAMETER = 0.01  # a curve with more parameters must predict so much better
_Array = npt.NDArray[np.float64]


class LossFit(Value, frozen=True):
    """The loss at 16 bits (nats per token) and its increase over `omega`: linear between the knots, through the origin before the
    first and, with `exponent`, as a power of omega (curves without knots and beyond the last).

    `leave_one_out`: mean |log(predicted / measured)| of points predicted from the others; 0.1 is about 10 %.
    """

    loss: float
    curve: CurveName
    slope: float
    exponent: float
    knots: tuple[tuple[float, float], ...]
    points: int
    leave_one_out: float

    def increase(self, omega: float) -> float:
        """Nats per token more than at 16 bits; grows with omega."""
        if self.knots and omega <= self.knots[-1][0]:
            xs, ys = zip((0.0, 0.0), *self.knots, strict=True)
            return float(np.interp(omega, xs, ys))
        return float(self.slope * omega**self.exponent)

    def largest_omega(self, increase: float) -> float:
        """The largest total omega that costs no more than `increase` nats per token."""
        if self.knots and increase < self.knots[-1][1]:
            points = [(0.0, 0.0), *self.knots]
            place = next(i for i, (_, y) in enumerate(points) if y > increase)
            (x0, y0), (x1, y1) = points[place - 1], points[place]
            return x0 + (x1 - x0) * (increase - y0) / (y1 - y0)
        return float((increase / self.slope) ** (1 / self.exponent))

    @classmethod
    def through(cls, loss: float, curve: CurveName, points: Sequence[Point]) -> Self:
        """`points` with positive omega and increase, at least one."""
        omega = np.array([point[0] for point in points])
        increase = np.array([point[1] for point in points])
        if curve == "isotonic":
            knots = _isotonic(omega, increase)
            slope = knots[-1][1] / knots[-1][0]
            return cls(loss, curve, slope, 1.0, knots, len(points), 0.0)
        x, y = np.log(omega), np.log(increase)
        exponent = 1.0
        if curve == "power":
            spread = float(((x - x.mean()) ** 2).sum())
            steepness = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 1.0
            exponent = min(max(steepness, _LEAST_EXPONENT), _MOST_EXPONENT)
        slope = float(np.exp((y - exponent * x).mean()))
        return cls(loss, curve, slope, exponent, (), len(points), 0.0)


_LEAST_EXPONENT = 0.1  # a curve must rise to be turned round
_MOST_EXPONENT = 4.0  # steeper is noise between points that hardly differ
_LEAST_POINTS: dict[CurveName, int] = {"proportional": 1, "power": 3, "isotonic": 3}


def fit_loss(loss: float, points: Sequence[Point]) -> LossFit | None:
    """The best of the curves, or None where no measured loss stands out from noise."""
    telling = [each for each in points if each[0] > 0 and each[1] > _STANDARD_ERRORS * each[2]]
    if not telling:
        return None
    candidates: list[CurveName] = [curve for curve, least in _LEAST_POINTS.items() if len(telling) > least]
    errors = {curve: leave_one_out(loss, curve, telling) for curve in candidates or ["proportional"]}
    best = next(iter(errors))
    for curve, error in errors.items():  # simplest first
        if error < errors[best] - _WORTH_A_PARAMETER:
            best = curve
    fitted = LossFit.through(loss, best, telling)
    return _with_error(fitted, errors[best])


def leave_one_out(loss: float, curve: CurveName, points: Sequence[Point]) -> float:
    """Mean |log(predicted / measured)| where each point is predicted from all others; 0 of a single point."""
    if len(points) < 2:
        return 0.0
    misses = []
    for place, (omega, increase, _) in enumerate(points):
        others = [*points[:place], *points[place + 1 :]]
        predicted = LossFit.through(loss, curve, others).increase(omega)
        misses.append(abs(float(np.log(max(predicted, 1e-12) / increase))))
    return sum(misses) / len(misses)


def _with_error(fitted: LossFit, error: float) -> LossFit:
    return LossFit(fitted.loss, fitted.curve, fitted.slope, fitted.exponent, fitted.knots, fitted.points, error)


def _isotonic(omega: _Array, increase: _Array) -> tuple[tuple[float, float], ...]:
    """Pool adjacent violators: blocks of equal mean increase, each a knot at its mean omega."""
    order = np.argsort(omega)
    blocks: list[tuple[float, float, int]] = []
    for x, y in zip(omega[order], increase[order], strict=True):
        blocks.append((float(x), float(y), 1))
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            (x1, y1, n1), (x0, y0, n0) = blocks.pop(), blocks.pop()
            count = n0 + n1
            blocks.append(((x0 * n0 + x1 * n1) / count, (y0 * n0 + y1 * n1) / count, count))
    return tuple((x, y) for x, y, _ in blocks)
