"""Loading one role: from a checkpoint to a StageModel, one layer at a time.

Called by the slot's prepare. A linear is read in the compute type and stored in its format, its dense weight freed, then
comes the next: beyond the finished stage never more than one dense linear is held (one layer where the checkpoint's tensors
are not those of the model, as merged experts). Tensors of other layers are not read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.formats import FormatName
from strata_planner.contract.roles import Role
from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.loading.adapter import ModelSlice, read_config
from strata_runtime.loading.blocked import BlockedLinear, can_block
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.experts import use_padded_experts
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.precision import COMPUTE_DTYPES, make_linear


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
    dtype = COMPUTE_DTYPES[role.compute_type]
    checkpoint = Checkpoint(model_path)
    stage = ModelSlice(config, role.layers, embedding=role.embedding, head=role.head, dtype=dtype)
    use_padded_experts(stage.module)
    sources = stage.sources(checkpoint.keys)
    checkpoint.check(key for keys in sources.values() for key in keys)
    stage.initialise_buffers(device)
    with freed_at_once():
        stage.load(checkpoint.read(sources.get(None, ()), dtype, device), device)
        stage.tie()
        _store(stage.own_head(), "dense", dtype)  # while nothing else is held: it takes its table twice
        for done, (layer, name) in enumerate(zip(range(first, last + 1), role.format, strict=True)):
            for keys in _one_linear_at_a_time(stage, sources[layer]):
                stage.load(checkpoint.read(keys, dtype, device), device)
                _store(stage.linears(layer), name, dtype)
            progress(done + 1, last - first + 1)
        stage.finish()
    return StageModel(stage, num_layers=last - first + 1, device=device)


def _one_linear_at_a_time(stage: ModelSlice, keys: Iterable[str]) -> list[list[str]]:
    """Checkpoint keys of one layer in groups that can be loaded apart: each linear's own, and all that is no linear's."""
    linears = {name for name, module in stage.module.named_modules() if type(module) is nn.Linear}
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        parent = key.rpartition(".")[0]
        groups[parent if parent in linears else ""].append(key)
    return list(groups.values())


def _store(linears: list[tuple[nn.Module, str, nn.Linear]], name: FormatName, dtype: torch.dtype) -> None:
    """Replace each linear that has been read by one that stores its weight in format `name`."""
    for parent, attribute, linear in linears:
        parameters = dict(linear.named_parameters())
        if any(parameter.is_meta for parameter in parameters.values()):
            continue
        weight = parameters["weight"].data
        bias = parameters["bias"].data if "bias" in parameters else None
        if name != "dense":
            stored: nn.Module = make_linear(weight, bias, name, dtype)
        elif can_block(dtype, weight.device):
            stored = BlockedLinear(weight, bias)
        else:
            continue
        setattr(parent, attribute, stored)
        linear.weight = None  # type: ignore[assignment]  # freed now, not when all are done
