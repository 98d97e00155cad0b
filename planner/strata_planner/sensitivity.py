"""What lowering a layer's precision costs in quality: omega per layer and bits, summed and weighed by theta.

Calibrated tables come from a file (the variance indicator of LLM-PQ, arXiv 2403.01136, Proposition 2, or any other). Where
there is none, a PRIOR is used and every plan says so: a layer's share of the parameters x 4^-bits (the error of rounding
falls by four with each bit), in units of the whole model at 8 bits. With it, theta = 1 values the step from 16 to 8 bits
for the whole model at one second of the batch's latency, and that from 8 to 4 bits at 255.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from strata_planner.contract.values import ContractError, Value, from_json
from strata_planner.errors import WorkloadError
from strata_planner.model import Model

PRIOR = "prior: parameter share x 4^-bits, no calibration"
_UNIT_BITS = 8


class Sensitivity(Value, frozen=True):
    """`omega[layer][bits]`, bits as text (a JSON key). Lower is better; 16 bits may be left out and count as 0."""

    source: str
    omega: tuple[dict[str, float], ...]

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Raises WorkloadError if there is no such table in the file."""
        try:
            return from_json(Path(path).read_bytes(), cls)
        except (OSError, ContractError) as error:
            raise WorkloadError(f"sensitivity table '{path}' cannot be read: {error}") from error

    def of(self, layer: int, bits: int) -> float:
        return self.omega[layer].get(str(bits), 0.0)

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


def prior(model: Model, bits: Sequence[int]) -> Sensitivity:
    total = sum(layer.linear_parameters for layer in model.layers)
    omega = tuple(
        {str(each): layer.linear_parameters / total * 4.0 ** (_UNIT_BITS - each) for each in bits}
        for layer in model.layers
    )
    return Sensitivity(PRIOR, omega)
