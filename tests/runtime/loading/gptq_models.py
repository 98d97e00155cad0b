"""GPTQ checkpoints of tiny random models, for tests of loading: every linear of a layer rounded to nearest and packed, all else as it was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_planner.contract.formats import FormatName
from strata_planner.contract.quantization import Zeros, read_quantization
from strata_planner.question.model import Model
from strata_runtime.formats.gptq import GptqCodes, encode
from strata_runtime.tools.gptq.solver import GptqSettings, round_to_nearest

BASE: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}


def is_a_layers_linear(key: str, tensor: Tensor) -> bool:
    return ".layers." in key and key.endswith(".weight") and tensor.ndim == 2 and not key.endswith("gate.weight")


def permuted(codes: GptqCodes) -> GptqCodes:
    """As act-order leaves it: groups are no runs of inputs."""
    generator = torch.Generator().manual_seed(codes.in_features)
    order = torch.randperm(codes.in_features, generator=generator)
    return GptqCodes(codes.bits, codes.codes[:, order].contiguous(), codes.scales, codes.zeros, codes.groups[order])


def make_gptq_model(
    plain: Path,
    folder: Path,
    description: Mapping[str, Any],
    *,
    convention: Zeros = "less one",
    quantize: Callable[[str, Tensor], bool] = is_a_layers_linear,
) -> dict[str, Tensor]:
    """Write the model `plain` to `folder` as `description` says. Returns its weights as they should be read, float32."""
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = described = BASE | dict(description)
    quantization = read_quantization(config)
    assert quantization is not None
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        name = key.removesuffix(".weight")
        how = quantization.of(name) if quantize(key, tensor) else None
        if how is None:
            stored[key] = wanted[key] = tensor
            continue
        settings = GptqSettings(how.bits, how.group, symmetric=how.symmetric)
        codes = round_to_nearest(tensor, settings)
        codes = permuted(codes) if described["desc_act"] else codes
        stored |= encode(codes, convention).named(name)
        wanted[key] = codes.dequantized()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return wanted


def make_plain_model(like: Path, folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """The same model in float32, with `weights`."""
    config = json.loads((like / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({key: config[key] for key in config if key != "quantization_config"})
    )
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def formats_of(model: Path) -> tuple[FormatName, ...]:
    return tuple(name or "dense" for name in Model.from_folder(model).stored_formats)
