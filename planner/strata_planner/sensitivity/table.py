"""The table itself: omega of each layer at each number of bits, where it is from, and how it translates into perplexity."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from strata_planner.contract.calibration import Calibration
from strata_planner.contract.values import ContractError, Value, from_json
from strata_planner.errors import WorkloadError
from strata_planner.question.model import Model
from strata_planner.sensitivity.fit import LossFit, fit_loss
from strata_planner.sensitivity.indicators import DEFAULT_INDICATOR, INDICATORS, IndicatorName, Omega

_UNIT_BITS = "8"


class Sensitivity(Value, frozen=True):
    """`omega[layer][bits]`, bits as text (a JSON key). Lower is better; 16 bits may be left out and count as 0.

    `fit`: from the sum of omega to the loss of the model, where that was measured.
    """

    source: str
    omega: tuple[dict[str, float], ...]
    fit: LossFit | None = None

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Raises WorkloadError if there is no such table in the file."""
        try:
            return from_json(Path(path).read_bytes(), cls)
        except (OSError, ContractError) as error:
            raise WorkloadError(f"sensitivity table '{path}' cannot be read: {error}") from error

    @classmethod
    def from_statistics(cls, calibration: Calibration, indicator: IndicatorName = DEFAULT_INDICATOR) -> Self:
        """omega as `indicator` makes it of the calibration's statistics, in units of the whole model at 8 bits."""
        made = INDICATORS[indicator]
        raw: list[Omega] = [made(layer) for layer in calibration.layers]
        unit = sum(layer[_UNIT_BITS] for layer in raw) or 1.0
        omega = tuple({bits: value / unit for bits, value in layer.items()} for layer in raw)
        source = f"calibrated: {indicator} indicator, {calibration.tokens} tokens of {calibration.text}"
        table = cls(source, omega)
        if calibration.loss is None:
            return table
        points = [(table.total(each.bits), each.increase, each.error) for each in calibration.measured]
        return cls(source, omega, fit_loss(calibration.loss, points))

    def completed(self, bits: Sequence[int]) -> Self:
        """With the widths of `bits` that lie between two known ones: the error of rounding falls geometrically with each bit."""
        omega = tuple({**layer, **_between(layer, bits)} for layer in self.omega)
        return type(self)(self.source, omega, self.fit)

    def of(self, layer: int, bits: int) -> float:
        return self.omega[layer].get(str(bits), 0.0)

    def total(self, bits: Sequence[int]) -> float:
        """The penalty of a model whose layers have these bits."""
        return sum(self.of(layer, each) for layer, each in enumerate(bits))

    def check(self, model: Model, bits: Sequence[int]) -> None:
        """Raises WorkloadError unless every layer has every bit-width below 16 that may be chosen."""
        if len(self.omega) != model.num_layers:
            raise WorkloadError(
                f"the sensitivity table has {len(self.omega)} layers, the model {model.num_layers}: calibrate this model"
            )
        for index, layer in enumerate(self.omega):
            missing = [each for each in bits if each != 16 and str(each) not in layer]
            if missing:
                raise WorkloadError(f"the sensitivity table lacks layer {index} at {missing} bits: calibrate again")

    def to_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1)


def _between(layer: dict[str, float], bits: Sequence[int]) -> dict[str, float]:
    known = sorted(int(each) for each in layer)
    found = {}
    for each in bits:
        below, above = [k for k in known if k < each], [k for k in known if k > each]
        if str(each) in layer or not below or not above:
            continue
        low, high = below[-1], above[0]
        share = (each - low) / (high - low)
        ends = layer[str(low)], layer[str(high)]
        found[str(each)] = (
            math.exp((1 - share) * math.log(ends[0]) + share * math.log(ends[1])) if min(ends) > 0 else min(ends)
        )
    return found


def check_shapes(calibration: Calibration, model: Model) -> None:
    """Raises WorkloadError unless the calibrated layers have as many parameters in their linears as the model's."""
    found = [sum(each.out_features * each.in_features for each in layer.linears) for layer in calibration.layers]
    wanted = [layer.linear_parameters for layer in model.layers]
    if len(found) != len(wanted):
        raise WorkloadError(
            f"the calibration has {len(found)} layers where the model has {len(wanted)}: calibrate this model"
        )
    for index, pair in enumerate(zip(found, wanted, strict=True)):
        if pair[0] != pair[1]:
            raise WorkloadError(
                f"the calibration has {pair[0]} parameters in the linears of layer {index} where the model has {pair[1]}: "
                "it is of another model; calibrate this one"
            )
