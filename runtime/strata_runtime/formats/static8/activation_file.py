"""The calibration of a model's activations, kept beside its checkpoint: for every linear the scale of its inputs and a smoothing factor each.

Written by `activation_calibration`, read by the loader where a plan stores layers in `w8a8_static`. One safetensors file: `<linear>.scale` float32 [],
`<linear>.smoothing` float32 [K], where `<linear>` is its path in the model; its metadata says which model, text and method it comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strata_planner.contract.model_folder import ACTIVATIONS_FILE
from strata_planner.contract.store import replacing
from strata_runtime.errors import InputError
from strata_runtime.formats.errors import NotCalibratedError

ACTIVATIONS_VERSION = "1"
_COMMAND = "python -m strata_runtime.tools.calibration.activation_calibration MODEL --text FILE"


@dataclass(frozen=True)
class ActivationEntry:
    """Of one linear: inputs are divided by `smoothing` (float32 [K], positive), then by `scale`, and rounded to int8."""

    scale: float
    smoothing: Tensor


@dataclass(frozen=True)
class Activations:
    """`entries`: by the linear's path in the model. `model`: the digest of the checkpoint (`loading.digest`). `notes`: where it comes from."""

    model: str
    entries: Mapping[str, ActivationEntry]
    notes: Mapping[str, str] = field(default_factory=dict)

    def entry(self, key: str) -> ActivationEntry:
        """Raises NotCalibratedError."""
        if key not in self.entries:
            raise NotCalibratedError(f"{key} is not in the calibration of activations: calibrate again with {_COMMAND}")
        return self.entries[key]

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises InputError."""
        tensors: dict[str, Tensor] = {}
        for key, entry in self.entries.items():
            tensors[f"{key}.scale"] = torch.tensor(entry.scale, dtype=torch.float32)
            tensors[f"{key}.smoothing"] = entry.smoothing.float().contiguous()
        notes = {**self.notes, "version": ACTIVATIONS_VERSION, "model": self.model}
        try:
            with replacing(path) as scratch:
                save_file(tensors, scratch, notes)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be written ({error}): name another place with --output") from error


def activations_of(folder: Path, model: str) -> Activations:
    """What lies beside the checkpoint in `folder`, whose digest is `model`. Raises NotCalibratedError as `read_activations` does."""
    return read_activations(folder / ACTIVATIONS_FILE, model)


def read_activations(path: Path, model: str) -> Activations:
    """Of the model with this digest. Raises NotCalibratedError for a file that is absent, damaged, of another release or of another model."""
    if not path.is_file():
        raise NotCalibratedError(
            f"layers are to be stored in w8a8_static, and there is no {path}: calibrate the model with {_COMMAND}, or plan with w8a8"
        )
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping
    except (OSError, SafetensorError) as error:
        raise NotCalibratedError(f"{path} is damaged ({error}): calibrate again with {_COMMAND}") from error
    version, found = notes.pop("version", None), notes.pop("model", "")
    if version != ACTIVATIONS_VERSION:
        raise NotCalibratedError(
            f"{path} has version {version}; this release reads version {ACTIVATIONS_VERSION}: calibrate again with {_COMMAND}"
        )
    if found != model:
        raise NotCalibratedError(
            f"{path} is of another model (digest {found[:12]}, this checkpoint has {model[:12]}): calibrate again with {_COMMAND}"
        )
    return Activations(model, _entries(tensors, path), notes)


def _entries(tensors: Mapping[str, Tensor], path: Path) -> dict[str, ActivationEntry]:
    entries = {}
    for key in (name.removesuffix(".scale") for name in tensors if name.endswith(".scale")):
        scale, smoothing = tensors[f"{key}.scale"], tensors.get(f"{key}.smoothing")
        if smoothing is None or not (scale > 0).all() or not ((smoothing > 0) & torch.isfinite(smoothing)).all():
            raise NotCalibratedError(
                f"{path}: {key} has no positive scale and factors: calibrate again with {_COMMAND}"
            )
        entries[key] = ActivationEntry(float(scale), smoothing)
    return entries
