"""Which checkpoints are quantized already (GPTQ, float8 by blocks), and in which format each of their linears is then loaded.

Used by `load_stage`. What is read of such a checkpoint, and how, is in a class for each method.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from strata_planner.contract.architectures import check_architecture
from strata_planner.contract.formats import STORED_FORMATS, FormatName
from strata_planner.contract.quantization import (
    CONFIG_FIELD,
    BlockFloat8,
    Quantization,
    is_read_to_16_bits,
    read_quantization,
    with_old_description,
    without_description,
)
from strata_runtime.errors import InputError
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.float8_checkpoint import BlockFloat8Checkpoint
from strata_runtime.loading.gptq_checkpoint import GptqCheckpoint
from strata_runtime.loading.mxfp4_checkpoint import Mxfp4Checkpoint
from strata_runtime.loading.stored_linears import QuantizedCheckpoint
from strata_runtime.model.adapter import read_config


def read_model_config(folder: Path) -> Any:
    """As `adapter.read_config`, for quantized models too."""
    quantization, fields = _description(folder)
    if quantization is None and not is_read_to_16_bits(fields):
        return read_config(folder)
    check_architecture(without_description(fields))
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers checks fields with exceptions of several trees
        raise InputError(f"{folder}/config.json is not a configuration of '{fields['model_type']}': {error}") from error
    vars(config).pop(CONFIG_FIELD, None)  # modules are built plain, and replaced here
    return config


def quantized_checkpoint(folder: Path) -> QuantizedCheckpoint | Mxfp4Checkpoint | None:
    """None: it is plain. Raises InputError where there is no safetensors checkpoint, UnsupportedModelError for a method that is not read."""
    quantization, fields = _description(folder)
    if is_read_to_16_bits(fields):
        return Mxfp4Checkpoint(folder)
    if quantization is None:
        return None
    if isinstance(quantization, BlockFloat8):
        return BlockFloat8Checkpoint(folder, quantization)
    return GptqCheckpoint(folder, quantization)


def format_in(checkpoint: Checkpoint, weight_key: str | None, layer_format: FormatName) -> FormatName:
    """The format of a linear in a layer of `layer_format`: in one of `gptq*` and `fp8_block`, what the checkpoint holds quantized; all else is dense.

    `weight_key` None: what is no linear, or is converted on its way. Raises InputError for these formats of a checkpoint that is not quantized.
    """
    if layer_format not in STORED_FORMATS:
        return layer_format
    if not isinstance(checkpoint, QuantizedCheckpoint):
        raise InputError(f"the plan has layers of {layer_format}, and {checkpoint.folder} is not quantized: plan again")
    if weight_key is None or not checkpoint.holds(weight_key):
        return "dense"
    return checkpoint.format_of(weight_key)


def _description(folder: Path) -> tuple[Quantization | BlockFloat8 | None, dict[str, Any]]:
    """None where config.json says nothing, or cannot be read: whoever reads it next says so."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, {}
    if not isinstance(fields, dict):
        return None, {}
    fields = with_old_description(fields, folder)
    return read_quantization(fields), fields
