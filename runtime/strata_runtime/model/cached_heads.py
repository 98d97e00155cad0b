"""How many key heads of which width a model's layers keep, by transformers' own reading of its config.json.

Used by a loaded stage and by whoever measures without one. The planner reads the same of config.json itself.
"""

from typing import Any, NamedTuple

from strata_planner.contract.kv import has_one_key_head


class CachedHeads(NamedTuple):
    heads: int
    width: int


def cached_heads(config: Any) -> CachedHeads:
    """config: of transformers, of the language model alone."""
    heads = int(config.num_attention_heads)
    count = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CachedHeads(1 if has_one_key_head(config.to_dict()) else int(count), int(width))
