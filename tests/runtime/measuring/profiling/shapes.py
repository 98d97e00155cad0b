"""A model so small that measuring it takes no time, and the few works that it is measured with."""

from typing import Any

from strata_runtime.measuring.profiling.grid import Work

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WORKS = (Work("decode", 2, 1, 20), Work("decode", 24, 1, 20), Work("prefill", 2, 40, 0), Work("prefill", 1, 16, 33))
