"""One load in a process of its own, for `benchmarks.loading`: `python -m benchmarks.load_once WAY FORMAT FOLDER`.

Prints `ready` when all that does not depend on the model is there, loads when a line arrives, prints what it took as JSON, ends with its input.
WAY is `stream` (load_stage), `keep` (the same, and what it quantizes stays in the node's cache) or `whole` (all dense weights first, then layer by
layer the same quantizers).
"""

import json
import sys
import time
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, FormatName
from strata_planner.contract.plan import DeviceRef, MicroBatch
from strata_planner.contract.roles import Neighbour, Role
from strata_runtime.allocator import freed_at_once, set_up_heap
from strata_runtime.formats import make_linear
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.loading import load_cache
from strata_runtime.loading.artefact import find_artefact
from strata_runtime.loading.blocked import BlockedLinear, can_block
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.warmup import warm_up
from strata_runtime.model.adapter import ModelSlice, read_config
from strata_runtime.slot.memory import private_bytes

_CPU = torch.device("cpu")
_DTYPE = torch.bfloat16


def main() -> None:
    way, name, folder = sys.argv[1], cast("FormatName", sys.argv[2]), Path(sys.argv[3])
    set_up_heap()
    warm_up()
    idle = private_bytes()
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter(), time.process_time()
    stage = whole(folder, name) if way == "whole" else streamed(folder, name, keep=way == "keep")
    took = time.perf_counter() - started[0], time.process_time() - started[1]
    told = {
        "seconds": took[0],
        "processor_seconds": took[1],
        "idle_bytes": idle,
        "held_bytes": private_bytes() - idle,
        "stored_bytes": stored_bytes(stage),
    }
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


def streamed(folder: Path, name: FormatName, *, keep: bool) -> StageModel:
    load_cache.FREE_SHARE = 0.0  # what is kept is removed with the model
    return load_stage(_role(folder, name), folder, lambda *_: None, _CPU, LoadOptions(keep=keep))


def whole(folder: Path, name: FormatName) -> StageModel:
    """Load-then-quantize."""
    config, checkpoint = read_config(folder), Checkpoint(folder)
    count = config.num_hidden_layers
    stage = ModelSlice(config, (0, count - 1), embedding=True, head=True, dtype=_DTYPE)
    sources = stage.sources(checkpoint.keys)
    checkpoint.transposed = stage.transposed(checkpoint.keys)
    stage.initialise_buffers(_CPU)
    with freed_at_once():
        for keys in sources.values():
            stage.load(checkpoint.read(keys, _DTYPE, _CPU), _CPU)
        stage.tie()
        for layer in range(count):
            _quantize(stage, folder, layer, name)
        stage.finish()
    return StageModel(stage, num_layers=count, device=_CPU)


def _quantize(stage: ModelSlice, folder: Path, layer: int, name: FormatName) -> None:
    artefact = find_artefact(folder) if name in ANY_PRECISION.values() else None
    for key, (parent, attribute) in stage.places(layer).items():
        linear = getattr(parent, attribute)
        weight = linear.weight.data
        if artefact is not None:
            stored: nn.Module = AnyLinear(artefact.read(key, BITS_OF_FORMAT[name], _DTYPE), None)
        elif name == "dense":
            if not can_block(_DTYPE, _CPU):
                continue
            stored = BlockedLinear(weight, None)
        else:
            stored = make_linear(weight, None, name, _DTYPE)
        linear.weight = None
        setattr(parent, attribute, stored)


def stored_bytes(model: StageModel) -> int:
    """All tensors of a stage, those that two modules share counted once."""
    module = model._stage.module  # noqa: SLF001  the whole of it
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    blocked = sum(
        2 * each.in_features * each.out_features for each in module.modules() if isinstance(each, BlockedLinear)
    )
    return blocked + sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _role(folder: Path, name: FormatName) -> Role:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    here = Neighbour("here", 0)
    return Role(
        replica=0,
        stage=0,
        stages=1,
        devices=(DeviceRef("cpu", 0, 1 << 40),),
        tensor_parallel=1,
        leader=True,
        layers=(0, layers - 1),
        bits=(BITS_OF_FORMAT[name],) * layers,
        format=(name,) * layers,
        kv_bits=16,
        kv_page_budget=1,
        replica_page_budget=1,
        page_tokens=16,
        embedding=True,
        head=True,
        model_uri=str(folder),
        compute_type="bfloat16",
        max_model_len=16,
        micro_batch=MicroBatch(1, 1, 16),
        predicted_bytes=0,
        next=here,
        previous=here,
    )


if __name__ == "__main__":
    main()
