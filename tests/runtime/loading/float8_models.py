"""Checkpoints in float8 with a scale for each block, of tiny random models, for tests of loading."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_planner.contract.quantization import BlockFloat8, read_quantization
from tests.runtime.loading.gptq_models import is_a_layers_linear

BLOCK = (16, 32)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded_in_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> codes float8 [N, K], scales float32 [blocks of N, blocks of K], and the weight that they stand for, block by block."""
    rows, columns = block
    codes, wanted = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            scale = (weight[place].abs().max() / LARGEST).bfloat16().float()
            codes[place] = (weight[place] / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            wanted[place] = codes[place].float() * scale
            scales[row, column] = scale
    return codes, scales, wanted


def make_float8_model(
    plain: Path, folder: Path, *, block: tuple[int, int] = BLOCK, skipped: Sequence[str] = ("lm_head",)
) -> dict[str, Tensor]:
    """Write the model `plain` to `folder` in float8. Returns its weights as they should be read, float32."""
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(skipped),
    }
    quantization = read_quantization(config)
    assert isinstance(quantization, BlockFloat8)
    stored: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        name = key.removesuffix(".weight")
        routes = name.endswith(("shared_expert_gate", "router.layer"))
        if routes or not is_a_layers_linear(key, tensor) or quantization.of(name) is None:
            stored[key] = wanted[key] = tensor
            continue
        codes, scales, wanted[key] = rounded_in_blocks(tensor, block)
        stored |= {key: codes, f"{name}.weight_scale_inv": scales.bfloat16()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return wanted
