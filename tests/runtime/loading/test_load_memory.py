"""What a load holds beyond what stays: the law of `loading.load`, counted tensor by tensor as memory is taken and let go."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strata_planner.contract.formats import FormatName
from strata_runtime.loading import checkpoint as checkpoint_module
from strata_runtime.loading.random_model import make_random_model
from tests.runtime.loading.stages import load, roles

HIDDEN, WIDE, LAYERS = 64, 192, 12
LARGEST_BYTES = HIDDEN * WIDE * 4  # of the linears, as read


class Held:
    """Bytes of the matrices that were read from the checkpoint and still exist."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.read = 0

    def of(self, read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: object, **keywords: object) -> torch.Tensor:
            tensor = read(*arguments, **keywords)
            if tensor.ndim == 2:
                size = tensor.nbytes
                self.now += size
                self.read += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._let_go, size)
            return tensor

        return counted

    def _let_go(self, size: int) -> None:
        self.now -= size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A middle stage of it has linears alone: no embedding, no head."""
    return make_random_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=32,
    )


@pytest.mark.parametrize("name", ["int8", "w8a8", "int4", "int3", "fp8_e4m3", "any3"])
def test_at_most_two_linears_are_held_as_they_were_read(
    name: FormatName, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(checkpoint_module, "_read", held.of(checkpoint_module._read))
    role = roles(model, 3, formats=[name] * LAYERS)[1]
    stage = load(role, model)
    gc.collect()
    assert held.read == LAYERS // 3 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE) * 4
    assert held.most <= 2 * LARGEST_BYTES
    assert held.now == 0
    assert len(stage.layers) == LAYERS // 3
