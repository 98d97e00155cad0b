"""Shallow models whose layers can be stored in every format: what some formats need beside dense weights, with random contents.

Used by `survey` and `company`. What a weight holds does not change how long its products take, so nothing is quantized: an any-precision copy
(`any*`) and ranges of activations (`w8a8_static`) are drawn, and in place of the checkpoint one is that lies as the model's own does (`gptq*`,
`fp8_block`).
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION, FORMAT_NAMES, STORED_FORMATS, FormatName
from strata_planner.contract.latencies import StoredLinear
from strata_planner.contract.model_folder import ACTIVATIONS_FILE, ANY_PRECISION_FOLDER, Recipe
from strata_planner.contract.quantization import (
    CONFIG_FIELD,
    BlockFloat8,
    ModuleQuantization,
    Quantization,
    read_quantization,
)
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import AnyParent
from strata_runtime.formats.gptq import GptqCodes, encode
from strata_runtime.formats.gptq.codes import group_of_inputs
from strata_runtime.formats.static8.activation_file import ActivationEntry, Activations
from strata_runtime.loading.artefact_writer import ArtefactWriter
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.linear_source import ANY_FORMATS
from strata_runtime.measuring.profiling.fields import depth_of
from strata_runtime.measuring.profiling.model import make_shallow
from strata_runtime.model.adapter import ModelSlice, read_config
from strata_runtime.model.layer_paths import in_layer, within_layer

_CPU = torch.device("cpu")
_WEIGHT = ".weight"
Shape = tuple[int, int]
Linears = Mapping[str, tuple[str, Shape]]  # of one layer: path in the model -> path in the checkpoint, [N, K]
How = Mapping[str, ModuleQuantization | None]  # path in the checkpoint -> how the linear is stored there


@dataclass(frozen=True)
class ShallowModels:
    """`plain`: the folder of a dense checkpoint, with what stands beside it; `quantized`: of each format of a quantized checkpoint its own, and how
    its linears lie.
    """

    plain: Path
    quantized: Mapping[FormatName, Path] = field(default_factory=dict)
    stored: Mapping[FormatName, tuple[StoredLinear, ...]] = field(default_factory=dict)

    def folder(self, name: FormatName) -> Path:
        """Where layers of this format are loaded from."""
        return self.quantized.get(name, self.plain)


def make_models(fields: Mapping[str, Any], layers: int, folder: Path, formats: Collection[FormatName]) -> ShallowModels:
    """Of the shapes in `fields`, so many layers deep, below `folder`. Raises InputError for a checkpoint's format that the model is not stored in."""
    plain = make_shallow(fields, layers, folder / "plain")
    config = read_config(plain)
    stage = ModelSlice(config, (0, layers - 1), embedding=False, head=False, dtype=torch.bfloat16)
    found = [_linears(stage, layer, Checkpoint(plain)) for layer in range(layers)]
    if ANY_FORMATS & set(formats):
        _write_copy(plain, found)
    if "w8a8_static" in formats:
        _write_ranges(plain, found)
    quantized: dict[FormatName, Path] = {}
    stored: dict[FormatName, tuple[StoredLinear, ...]] = {}
    for name in (each for each in FORMAT_NAMES if each in STORED_FORMATS.intersection(formats)):
        how = _example(fields, found[0], name)
        quantized[name] = folder / name
        _write_quantized(plain, quantized[name], found, how)
        stored[name] = tuple(StoredLinear(*shape, how[path]) for path, shape in found[0].values())
    return ShallowModels(plain, quantized, stored)


def _linears(stage: ModelSlice, layer: int, checkpoint: Checkpoint) -> Linears:
    """Those that lie in the checkpoint as they are; not what is converted first (fused experts)."""
    names = {stage.plain_parameter(name): name for name in checkpoint.keys}
    linears = {key: getattr(parent, name) for key, (parent, name) in stage.places(layer).items()}
    return {
        key: (names[key + _WEIGHT].removesuffix(_WEIGHT), (int(each.out_features), int(each.in_features)))
        for key, each in linears.items()
        if key + _WEIGHT in names
    }


def _write_copy(model: Path, found: list[Linears]) -> None:
    writer = ArtefactWriter(model / ANY_PRECISION_FOLDER, model_digest(model), len(found), Recipe())
    shapes = {shape for linears in found for _, shape in linears.values()}
    drawn = {shape: _parent(shape) for shape in sorted(shapes)}
    for layer, linears in enumerate(found):
        writer.write(
            layer,
            {key: shape for key, (_, shape) in linears.items()},
            ((key, drawn[shape]) for key, (_, shape) in linears.items()),
        )


def _parent(shape: Shape) -> AnyParent:
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    tables = {
        bits: (torch.randn(rows, 1 << bits, generator=generator) * columns**-0.5).sort().values.to(torch.float16)
        for bits in ANY_PRECISION
    }
    return AnyParent(torch.randint(0, 1 << max(tables), shape, generator=generator, dtype=torch.uint8), tables)


def _write_ranges(model: Path, found: list[Linears]) -> None:
    entries = {
        key: ActivationEntry(1.0, torch.ones(columns))
        for linears in found
        for key, (_, (_, columns)) in linears.items()
    }
    Activations(model_digest(model), entries).write(model / ACTIVATIONS_FILE)


def _example(fields: Mapping[str, Any], linears: Linears, name: FormatName) -> How:
    """How the first layer lies that is stored in this format for the most part."""
    quantization = read_quantization(fields)
    if quantization is None:
        raise InputError(
            f"{name}: layers of a quantized checkpoint are measured as it holds them, and this config.json has no {CONFIG_FIELD}: "
            "give the model's quantized checkpoint, or leave the format out"
        )
    for layer in range(depth_of(fields)):
        how = _stored_in(quantization, linears, layer)
        weights: Counter[FormatName] = Counter()
        for path, (rows, columns) in linears.values():
            own = how[path]
            if own is not None:
                weights[own.format] += rows * columns
        if weights and weights.most_common(1)[0][0] == name:
            return how
    raise InputError(f"{name}: no layer of this checkpoint is stored so; leave the format out")


def _stored_in(quantization: Quantization | BlockFloat8, linears: Linears, layer: int) -> How:
    paths = (path for path, _ in linears.values())
    return {path: quantization.of(in_layer(path, layer)) for path in paths}


def _write_quantized(plain: Path, folder: Path, found: list[Linears], how: How) -> None:
    """The model `plain` with all its layers as `how` has the first."""
    checkpoint = Checkpoint(plain)
    tensors = checkpoint.read(checkpoint.keys, torch.bfloat16, _CPU)
    dynamic: dict[str, dict[str, Any]] = {}
    for path, shape in (each for linears in found for each in linears.values()):
        own = how[in_layer(path, 0)]
        pattern = f"{re.escape(path)}$"
        if own is None:
            dynamic[f"-:{pattern}"] = {}
            continue
        if own.block is None:
            dynamic[f"+:{pattern}"] = _described(own)
        del tensors[path + _WEIGHT]
        tensors |= _float8(path, shape, own.block) if own.block else encode(_codes(shape, own), "plain").named(path)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    whole: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "dynamic": dynamic}
    block = next((each.block for each in how.values() if each and each.block), None)
    if block:
        skipped = [within_layer(path) for path, each in how.items() if each is None]
        whole = {"quant_method": "fp8", "weight_block_size": list(block), "modules_to_not_convert": skipped}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {CONFIG_FIELD: whole}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _described(how: ModuleQuantization) -> dict[str, Any]:
    return {"bits": how.bits, "group_size": how.group or -1, "desc_act": how.ordered, "sym": how.symmetric}


def _float8(path: str, shape: Shape, block: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = torch.ones([-(-size // of_block) for size, of_block in zip(shape, block, strict=True)])
    codes = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(torch.float8_e4m3fn)
    return {f"{path}.weight": codes, f"{path}.weight_scale_inv": scales}


def _codes(shape: Shape, how: ModuleQuantization) -> GptqCodes:
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    groups = group_of_inputs(columns, min(how.group or columns, columns))
    count = int(groups[-1]) + 1
    if how.ordered:
        groups = groups[torch.randperm(columns, generator=generator)]
    return GptqCodes(
        how.bits,
        torch.randint(0, 1 << how.bits, shape, generator=generator, dtype=torch.uint8),
        torch.rand(rows, count, generator=generator).add_(0.5).mul_(columns**-0.5 / (1 << how.bits)),
        torch.full((rows, count), 1 << how.bits - 1, dtype=torch.uint8),
        groups,
    )
