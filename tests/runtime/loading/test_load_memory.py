"""What a load holds beyond what stays: the law of `loading.load`, counted tensor by tensor as memory is taken and let go."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, make_linear
from strata_runtime.loading import checkpoint as checkpoint_module
from strata_runtime.loading import load_cache
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.linear_source import ANY_FORMATS
from strata_runtime.model.random_model import make_random_model
from tests.laws import swept
from tests.runtime.loading.artefacts import dense_weights
from tests.runtime.loading.stages import load, roles

HIDDEN, WIDE, LAYERS = 64, 192, 6


class Held:
    """Bytes of the memory that matrices were read into and that still exists; some of it is read into again."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.read = 0
        self._known: set[int] = set()

    def of(self, read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: object, **keywords: object) -> torch.Tensor:
            tensor = read(*arguments, **keywords)
            if tensor.ndim == 2:
                self.read += tensor.nbytes
                self._count(tensor.untyped_storage())
            return tensor

        return counted

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self._known:
            return
        self._known.add(storage.data_ptr())
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, storage.data_ptr(), storage.nbytes())

    def _let_go(self, address: int, size: int) -> None:
        self._known.remove(address)
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


# Share of the disk that must stay free: the layers are kept, or they are not.
KEPT: tuple[tuple[FormatName, float], ...] = (
    ("any3", 0.0),
    ("any3", 1.0),
)


READ = {  # by what is read and how
    f"{name}-{free:g}-{compute_type}": (name, free, compute_type)
    for name, free in (*((name, 0.0) for name in ("int8", "w8a8", "int4", "int3", "fp8_e4m3")), *KEPT)
    for compute_type in ("float32", "bfloat16")
}


@pytest.mark.parametrize("case", swept(READ, ["int8-0-bfloat16", "any3-1-bfloat16"]))
def test_at_most_two_linears_are_held_as_they_were_read(
    case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, free, compute_type = READ[case]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load_cache, "FREE_SHARE", free)
    held = Held()
    monkeypatch.setattr(checkpoint_module, "_read", held.of(checkpoint_module._read))
    role = roles(model, 3, formats=[name] * LAYERS, compute_type=compute_type)[1]
    stage = load(role, model, keep=True)
    gc.collect()
    item = COMPUTE_TYPE_BYTES["float32" if name in ANY_FORMATS else compute_type]  # quantized from what is stored
    assert held.read == LAYERS // 3 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE) * item
    assert held.most <= 2 * HIDDEN * WIDE * item
    assert held.now == 0
    assert len(stage.layers) == LAYERS // 3


@pytest.mark.parametrize("name", swept(MAKERS, ["int8", "w8a8", "int4", "fp8_e4m3", "any4"]))
@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
def test_what_is_stored_survives_that_its_memory_is_read_into_again(
    name: FormatName, compute_type: ComputeType, model: Path
) -> None:
    role = roles(model, 3, formats=[name] * LAYERS, compute_type=compute_type)[1]
    stage = load(role, model)
    inputs = {width: torch.randn(3, width).to(COMPUTE_DTYPES[compute_type]) for width in (HIDDEN, WIDE)}
    for layer in range(LAYERS // 3, 2 * LAYERS // 3):
        stored = dense_weights(model, layer)
        for key, linear in stage.linears(layer).items():
            assert stage.source is not None
            weight = stored[key] if name in ANY_FORMATS else stage.source.dense(key)
            alone = BlockedLinear(weight, None) if isinstance(linear, BlockedLinear) else None
            alone = alone or make_linear(weight, None, name, COMPUTE_DTYPES[compute_type])
            assert torch.equal(linear(inputs[weight.shape[1]]), alone(inputs[weight.shape[1]]))
