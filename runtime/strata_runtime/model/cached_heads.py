"""How many key heads of which width a model's layers keep, by transformers' own reading of its config.json.

Used by a loaded stage and by whoever measures without one. The planner reads the same of config.json itself.
"""

from typing import Any, NamedTuple

from strata_planner.contract.kv import has_one_key_head


class CachedHeads(NamedTuple):
    heads: int
    width: int
    latent: bool  # one entry for keys and values


def cached_heads(config: Any) -> CachedHeads:
    """config: of transformers, of the language model alone."""
    heads = int(config.num_attention_heads)
    count = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):
        return CachedHeads(1, int(config.kv_lora_rank + config.qk_rope_head_dim), latent=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CachedHeads(1 if has_one_key_head(config.to_dict()) else int(count), int(width), latent=False)
