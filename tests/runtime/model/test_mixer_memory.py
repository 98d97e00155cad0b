"""What a layer with state has alive at once is within what plans count for it, and not far below."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import Segment
from strata_planner.contract.roles import roles_of
from strata_planner.costs import working
from strata_planner.costs.working import StepShape, Storage, working_memory
from strata_planner.question.model import Model
from strata_runtime.model.kv import states
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.stages import load
from tests.runtime.plans import even_plan

WIDE = {"hidden_size": 256, "intermediate_size": 64, "max_position_embeddings": 2048, "num_hidden_layers": 1}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "two values a key": (
        "qwen3_next",
        {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention"],
            "num_experts": 0,
        },
    ),
    "wide keys": (
        "qwen3_next",
        {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention"],
            "num_experts": 0,
        },
    ),
    "convolution": ("lfm2", {"layer_types": ["conv"], "block_auto_adjust_ff_dim": False}),
}
STEPS = {"prompt": [(0, 512)], "short prompt": [(0, 64)], "decoding": [(sequence, 1) for sequence in range(32)]}


class LiveBytes(TorchDispatchMode):
    """Of tensors that operations have made and that are still there, at the highest."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(each)._cdata for each in tree_leaves((args, kwargs)) if _is_plain(each)}
        made = operation(*args, **(kwargs or {}))
        for each in filter(_is_plain, tree_leaves(made)):
            storage = _storage(each)
            key, size = storage._cdata, storage.nbytes()
            if key not in given | self._known:
                self._known.add(key)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._gone, key, size)
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_mkldnn


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def measured(forward: Callable[..., Any], peaks: list[int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with LiveBytes() as live:
            out = forward(*args, **kwargs)
        peaks.append(live.peak)
        return out

    return run


@pytest.mark.parametrize("compute_type", ["bfloat16", "float32"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_layer_with_state_takes_what_is_counted(
    shape: tuple[str, dict[str, Any]], step: list[tuple[int, int]], compute_type: ComputeType, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, shape[0], **WIDE, **shape[1])
    plan = even_plan(model, ["s0"], compute_type=compute_type, pages=64, max_model_len=1024)
    (role,) = roles_of(structs.replace(plan, replicas=(structs.replace(plan.replicas[0], concurrency=32),)))["s0"]
    stage = load(role, model)
    (layer,) = stage.layers
    mixer: Any = getattr(layer, "linear_attn", None) or layer.conv
    peaks: list[int] = []
    mixer.forward = measured(mixer.forward, peaks)
    segments = OwnBlocks(64, role.page_tokens).deal([Segment(sequence, 0, length, 0) for sequence, length in step])
    tokens = sum(length for _, length in step)
    stage.forward(torch.zeros(tokens, dtype=torch.int64), cache_of(role, stage).plan(segments))
    counted = _counted(Model.from_folder(model), StepShape(tokens, len(step), 1024), compute_type)
    assert peaks[0] <= counted
    if (
        compute_type != "float32" and len(step) == 1
    ):  # there what MKL packs counts too; and so many tokens may be of one prompt
        assert peaks[0] >= 0.5 * counted


def _counted(model: Model, step: StepShape, compute_type: ComputeType) -> int:
    storage = Storage(frozenset({"dense"}), compute_type, on_cpu=True)
    layer = working._Layer(model.layers[0], step.tokens, step, storage, model.hidden_size)
    state = model.layers[0].state
    assert state is not None
    assert layer._mixing(state) <= working_memory(model, step, storage, head=False).layer
    return layer._mixing(state)


def test_as_many_tokens_pass_at_once_as_are_counted() -> None:
    assert working.STATE_TOKENS == states.TOKENS_AT_ONCE
