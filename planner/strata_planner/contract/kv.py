"""How keys and values lie in a slot's pool: bytes of one token in one layer.

The planner counts with it and the runtime allocates by it, so that predicted and measured KV are the same number. Knows nothing of pages.

| kvCacheBits | stored per token and layer, for keys and for values                              |
|-------------|----------------------------------------------------------------------------------|
| 16          | kv_heads * head_dim in the compute type                                          |
| 8           | kv_heads * head_dim int8, a symmetric scale per head in bfloat16                 |
"""

from collections.abc import Mapping
from typing import Any

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType

KV_BITS = (16, 8)
_SCALE_BYTES = 2  # bfloat16: it reaches as far as the values do, whatever the compute type is


def has_one_key_head(config: Mapping[str, Any]) -> bool:
    """Whether all heads share a key, whatever config.json counts: Falcon before its new decoder."""
    is_old_falcon = config.get("model_type") == "falcon" and not config.get("new_decoder_architecture")
    return is_old_falcon and bool(config.get("multi_query", True))


def kv_token_bytes(
    kv_bits: int, kv_heads: int, head_dim: int, compute_type: ComputeType, *, latent: bool = False
) -> int:
    """Keys and values of one token in one layer, scales included; 16 bits mean the compute type. `latent`: both are one entry, half of
    which lies where a key would, half where a value would (multi-head latent attention, arXiv 2405.04434).
    """
    head_dim //= 1 + latent
    head = head_dim * COMPUTE_TYPE_BYTES[compute_type] if kv_bits == 16 else head_dim + _SCALE_BYTES
    return 2 * kv_heads * head
