"""Models that the pipeline's tests share."""

from pathlib import Path

import pytest

from strata_runtime.model.random_model import make_random_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, grouped-query attention, random weights in float32."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    shapes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return make_random_model(folder, "llama", **shapes)
