"""The fields of a config.json that say what shapes a model has, and how a GPTQ checkpoint holds them. Used before anything is imported that takes seconds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata_planner.contract.quantization import with_old_description
from strata_planner.contract.text_part import text_part
from strata_runtime.errors import InputError

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_NOT_SHAPES = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def read_fields(model: Path) -> dict[str, Any]:
    """The fields of `config.json` (a folder's, or that file). Raises InputError."""
    file = model / "config.json" if model.is_dir() else model
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON ({error}); give the folder of a Hugging Face model") from error
    fields = text_part(fields) if isinstance(fields, dict) else fields
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str) or not depth_of(fields):
        raise InputError(f"{file} names no model_type or no number of layers; give the config.json of a language model")
    fields = with_old_description(fields, file.parent)
    return {name: value for name, value in fields.items() if name not in _NOT_SHAPES}


def depth_of(fields: Mapping[str, Any]) -> int:
    """Layers of the model; 0: not said."""
    return int(next((fields[name] for name in DEPTHS if fields.get(name)), 0))
