"""Checkpoints whose linears are quantized already (GPTQ): the same tensors as of a plain one, and its linears as they are stored.

Used by `load_stage`, which asks for `X.weight` whatever the checkpoint holds: read as a tensor it is dequantized, read as a linear it stays at its
own bits. A linear is quantized where `X.qweight` lies in the checkpoint; bits, groups and zeros are as quantization_config says.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from strata_planner.contract.architectures import check_architecture
from strata_planner.contract.formats import GPTQ, FormatName
from strata_planner.contract.quantization import (
    CONFIG_FIELD,
    ModuleQuantization,
    Quantization,
    read_quantization,
    with_old_description,
    without_description,
)
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq import PARTS, GptqCodes, GptqTensors, decode, store
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.model.adapter import read_config

GPTQ_FORMATS = frozenset(GPTQ.values())
_WEIGHT, _CODES = ".weight", ".qweight"
_CPU = torch.device("cpu")


def read_model_config(folder: Path) -> Any:
    """As `adapter.read_config`, for quantized models too."""
    quantization, fields = _description(folder)
    if quantization is None:
        return read_config(folder)
    check_architecture(without_description(fields))
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers checks fields with exceptions of several trees
        raise InputError(f"{folder}/config.json is not a configuration of '{fields['model_type']}': {error}") from error
    vars(config).pop(CONFIG_FIELD, None)  # modules are built plain, and replaced here
    return config


def quantized_checkpoint(folder: Path) -> "QuantizedCheckpoint | None":
    """None: it is plain. Raises InputError where there is no safetensors checkpoint, UnsupportedModelError for another method than GPTQ."""
    quantization, _ = _description(folder)
    return None if quantization is None else QuantizedCheckpoint(folder, quantization)


def format_in(checkpoint: Checkpoint, weight_key: str | None, layer_format: FormatName) -> FormatName:
    """The format of a linear in a layer of `layer_format`: in a layer of `gptq*`, what the checkpoint holds quantized; all else is dense.

    `weight_key` None: what is no linear, or is converted on its way. Raises InputError for `gptq*` of a checkpoint that is not quantized.
    """
    if layer_format not in GPTQ_FORMATS:
        return layer_format
    if not isinstance(checkpoint, QuantizedCheckpoint):
        raise InputError(f"the plan has layers of {layer_format}, and {checkpoint.folder} is not quantized: plan again")
    if weight_key is None or not checkpoint.holds(weight_key):
        return "dense"
    return checkpoint.quantization_of(weight_key).format


class QuantizedCheckpoint(Checkpoint):
    """`keys` are those of the plain model: `X.weight` for the parts of a quantized linear X."""

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self.quantization = quantization
        self._parts: dict[str, dict[str, str]] = {}
        stored = set(super().keys)
        for key in super().keys:
            if key.endswith(_CODES):
                name = key.removesuffix(_CODES)
                self._parts[name + _WEIGHT] = {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in stored}

    @property
    def keys(self) -> tuple[str, ...]:
        hidden = {part for parts in self._parts.values() for part in parts.values()}
        return (*(key for key in super().keys if key not in hidden), *self._parts)

    def holds(self, weight_key: str) -> bool:
        """Whether the linear of `X.weight` is quantized."""
        return weight_key in self._parts

    def check(self, keys: Iterable[str]) -> None:
        super().check(name for key in keys for name in self._stored_names(key))

    def read(self, keys: Iterable[str], dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        """Quantized weights are dequantized: exact (float32, where no type is asked for), then rounded once to `dtype`."""
        wanted = list(keys)
        tensors = super().read((key for key in wanted if key not in self._parts), dtype, device)
        for key in wanted:
            if key in self._parts:
                tensors[key] = self._codes(key, None).dequantized(dtype or torch.float32).to(device)
        return tensors

    def read_linear(self, tensors: Mapping[str, str], shape: tuple[int, int], dtype: torch.dtype) -> GptqLinear:
        """At its own bits, on the CPU. `tensors`: `weight` and perhaps `bias` -> its name here; `shape`: [N, K] as the model has it."""
        key = tensors["weight"]
        codes = self._codes(key, shape)
        stored = store(codes, group=self.quantization_of(key).group, name=key.removesuffix(_WEIGHT))
        bias = self.read([tensors["bias"]], dtype, _CPU)[tensors["bias"]] if "bias" in tensors else None
        return GptqLinear(stored, bias)

    def quantization_of(self, weight_key: str) -> ModuleQuantization:
        name = weight_key.removesuffix(_WEIGHT)
        how = self.quantization.of(name)
        if how is None:
            raise InputError(
                f"{name}{_CODES} is in the checkpoint, and quantization_config says that {name} is not quantized: "
                "correct its `dynamic` or `modules_in_block_to_quantize`, or fetch the checkpoint again"
            )
        return how

    def _codes(self, weight_key: str, shape: tuple[int, int] | None) -> GptqCodes:
        names = self._parts[weight_key]
        # float32 holds scales of any 16-bit type exactly
        read = super().read(names.values(), torch.float32, _CPU)
        name = weight_key.removesuffix(_WEIGHT)
        parts = GptqTensors.of(name, {part: read[stored] for part, stored in names.items()})
        return decode(name, parts, self.quantization_of(weight_key), self.quantization.zeros, shape)

    def _stored_names(self, key: str) -> Iterable[str]:
        return self._parts[key].values() if key in self._parts else (key,)


def _description(folder: Path) -> tuple[Quantization | None, dict[str, Any]]:
    """None where config.json says nothing, or cannot be read: whoever reads it next says so."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, {}
    if not isinstance(fields, dict):
        return None, {}
    fields = with_old_description(fields, folder)
    return read_quantization(fields), fields
