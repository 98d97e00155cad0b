"""Any-precision copies of tiny models, for the tests of loading and of changing precision. Weights count alike."""

from collections.abc import Iterator
from pathlib import Path

import torch

from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, Recipe
from strata_runtime.formats.any_precision import AnyParent, quantize_any
from strata_runtime.loading.artefact_writer import ArtefactWriter
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.digest import model_digest
from strata_runtime.model.adapter import ModelSlice, read_config

CPU = torch.device("cpu")


def dense_weights(model: Path, layer: int) -> dict[str, torch.Tensor]:
    """Key -> weight float32 of the linears of a layer whose checkpoint has them as they are."""
    config = read_config(model)
    stage = ModelSlice(config, (layer, layer), embedding=False, head=False, dtype=torch.float32)
    checkpoint = Checkpoint(model)
    checkpoint.transposed = stage.transposed(checkpoint.keys)
    keys = {(stage.plain_parameter(key) or "").removesuffix(".weight"): key for key in checkpoint.keys}
    names = [key for key in stage.places(layer) if key in keys]
    read = checkpoint.read([keys[name] for name in names], torch.float32, CPU)
    return {name: read[keys[name]] for name in names}


def parents(weights: dict[str, torch.Tensor], recipe: Recipe) -> Iterator[tuple[str, AnyParent]]:
    for key, weight in weights.items():
        yield key, quantize_any(weight, recipe.bits, seed_bits=recipe.seed_bits)


def write_artefact(model: Path, folder: Path | None = None, *, recipe: Recipe | None = None, layers: int = 6) -> Path:
    """The copy of the first `layers` layers, beside the model or in `folder`; returns where."""
    chosen = recipe or Recipe()
    folder = folder or model / ANY_PRECISION_FOLDER
    writer = ArtefactWriter(folder, model_digest(model), read_config(model).num_hidden_layers, chosen)
    for layer in range(layers):
        weights = dense_weights(model, layer)
        shapes = {key: (weight.shape[0], weight.shape[1]) for key, weight in weights.items()}
        writer.write(layer, shapes, parents(weights, chosen))
    return folder
