"""Models that the pipeline's tests share."""

from pathlib import Path

import pytest

from strata_runtime.model.random_model import make_random_model
from tests.laws import Lazy

streams = Lazy("tests.runtime.slot.streams")

SHAPES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, grouped-query attention, random weights in float32."""
    return make_random_model(tmp_path_factory.mktemp("tiny-llama"), "llama", num_hidden_layers=6, **SHAPES)


@pytest.fixture(scope="session")
def shallow_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a layer for each of three stages: for laws of steps, which take as many whatever a step computes."""
    return make_random_model(tmp_path_factory.mktemp("shallow-llama"), "llama", num_hidden_layers=3, **SHAPES)


@pytest.fixture(scope="session")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    """What the requests of `streams` get that no change of epoch disturbs."""
    return streams.undisturbed(tiny_llama)
