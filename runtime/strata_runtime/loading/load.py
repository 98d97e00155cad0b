"""Loading one role: from a checkpoint to a StageModel, one layer at a time.

Called by the slot's prepare. A layer is read in the compute type, its linears are quantized, its dense weights freed, then
comes the next: beyond the finished stage never more than one dense layer is held. Tensors of other layers are not read.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.formats import FormatName
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.loading.adapter import ModelSlice, read_config
from strata_runtime.loading.blocked import BlockedLinear, can_block
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.precision import make_linear

COMPUTE_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_stage(role: Role, model_path: Path, progress: Callable[[int, int], None], device: torch.device) -> StageModel:
    """The role's layers from the folder `model_path`, on `device`. `progress(done, total)` is called after each layer.

    Raises UnsupportedModelError for what the engine or a format cannot do, InputError for a checkpoint that is damaged,
    incomplete or does not have the role's layers.
    """
    config = read_config(model_path)
    check_formats(config.to_dict(), role.format)
    first, last = role.layers
    if last >= config.num_hidden_layers:
        raise InputError(
            f"role asks for layers {first}..{last}; {model_path} has {config.num_hidden_layers}: plan again"
        )
    dtype = COMPUTE_TYPES[role.compute_type]
    checkpoint = Checkpoint(model_path)
    stage = ModelSlice(config, role.layers, embedding=role.embedding, head=role.head, dtype=dtype)
    sources = stage.sources(checkpoint.keys)
    checkpoint.check(key for keys in sources.values() for key in keys)
    stage.initialise_buffers(device)
    stage.load(checkpoint.read(sources.get(None, ()), dtype, device), device)
    stage.tie()
    _store(stage.own_head(), "dense", dtype)
    for done, (layer, name) in enumerate(zip(range(first, last + 1), role.format, strict=True)):
        stage.load(checkpoint.read(sources[layer], dtype, device), device)
        _store(stage.linears(layer), name, dtype)
        progress(done + 1, last - first + 1)
    stage.finish()
    _return_freed_memory()
    return StageModel(stage, num_layers=last - first + 1, device=device)


def _store(linears: list[tuple[nn.Module, str, nn.Linear]], name: FormatName, dtype: torch.dtype) -> None:
    """Replace each linear by one that stores its weight in format `name`."""
    for parent, attribute, linear in linears:
        parameters = dict(linear.named_parameters())
        weight = parameters["weight"].data
        bias = parameters["bias"].data if "bias" in parameters else None
        if name != "dense":
            stored: nn.Module = make_linear(weight, bias, name, dtype)
        elif can_block(dtype, weight.device):
            stored = BlockedLinear(weight, bias)
        else:
            continue
        setattr(parent, attribute, stored)
        linear.weight = None  # type: ignore[assignment]  # freed now, not when the whole layer is done


def _return_freed_memory() -> None:
    """Give the dense layers' memory back to the system: glibc would keep it for later."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
