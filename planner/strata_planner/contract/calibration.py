"""The calibration of a model: what one pass of a text through it says of its layers, kept beside the checkpoint.

Written by `strata_runtime.tools.calibration`, read by the planner's sensitivity. A file of another model or release is refused:
`fingerprint` ties it to config.json, `check` to the version. Weights changed under the same config.json are not noticed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from strata_planner.contract.values import ContractError, Value, from_json, to_json

CALIBRATION_VERSION = 1
CALIBRATION_FILE = "strata-sensitivity.json"
# Fields of config.json that change no shape and no arithmetic of a layer: how it was saved, how text is generated.
_INCIDENTAL = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "architectures", "auto_map"}
)


class LinearStatistics(Value, frozen=True):
    """One linear with weight [out_features, in_features] and its inputs over all calibration tokens.

    `group_range_square`: mean over the groups of int4 and int3 of (max - min)^2 of their weights; `channel_peak_square`:
    mean over the outputs of max |w|^2 (int8). `deviation`: bits -> how far the error of this linear, stored at these bits by
    the runtime's own quantizer, moves the layer's output y: the mean over tokens of |dy|^2 / |y|^2.
    """

    name: str
    out_features: int
    in_features: int
    input_mean: float
    input_variance: float
    weight_min: float
    weight_max: float
    group_range_square: float
    channel_peak_square: float
    deviation: dict[str, float]


class LayerStatistics(Value, frozen=True):
    linears: tuple[LinearStatistics, ...]


class MeasuredLoss(Value, frozen=True):
    """Mean negative log likelihood per token with the layers at `bits`, and how much more than at 16 bits that is.

    `error`: the standard error of `increase`, from paired differences of windows of text.
    """

    bits: tuple[int, ...]
    loss: float
    increase: float
    error: float


class Calibration(Value, frozen=True):
    """`text`: the name of the text; `tokens` of it gave the statistics, `held_back_tokens` others the losses."""

    version: int
    fingerprint: str
    text: str
    tokens: int
    layers: tuple[LayerStatistics, ...]
    held_back_tokens: int = 0
    loss: float | None = None  # at 16 bits, on the tokens held back
    measured: tuple[MeasuredLoss, ...] = ()

    @classmethod
    def from_file(cls, path: Path | str, config: dict[str, Any]) -> Self:
        """Raises ContractError unless the file is of this release and of the model with this config.json."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ContractError(f"calibration '{path}' cannot be read: {error.strerror}") from error
        try:
            version = json.loads(data).get("version")
        except (ValueError, AttributeError) as error:
            raise ContractError(f"calibration '{path}' is no JSON object: calibrate again") from error
        if version != CALIBRATION_VERSION:
            raise ContractError(
                f"calibration '{path}' has version {version}; this release reads version {CALIBRATION_VERSION}: calibrate again"
            )
        calibration = from_json(data, cls)
        if calibration.fingerprint != fingerprint(config):
            raise ContractError(
                f"calibration '{path}' is of another model (fingerprint {calibration.fingerprint[:12]}, this config.json has "
                f"{fingerprint(config)[:12]}): calibrate this model, or remove the file"
            )
        return calibration

    def encode(self) -> bytes:
        return to_json(self)


def fingerprint(config: dict[str, Any]) -> str:
    """Of the fields of config.json that shape the model, whatever their order."""
    shaping = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()
