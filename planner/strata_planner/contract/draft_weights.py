"""Draft weights: which layers read fewer bits of their own weights to draft tokens, and what that takes beside the weights.

The planner counts with these, the runtime makes them (`loading.drafts`). A layer of bit-planes drafts with its first planes, which it holds
already, and a small table; one of 16 bits with planes of its any-precision copy, where the deployment asks for it by name. All others draft
with themselves.
"""

from strata_planner.contract.formats import (
    ANY_PRECISION,
    BITS_OF_FORMAT,
    COMPUTE_TYPE_BYTES,
    ComputeType,
    FormatName,
    stored_bytes,
)
from strata_planner.contract.plan import Speculation

_OF_PLANES = frozenset(ANY_PRECISION.values())


def has_draft(name: FormatName, wish: Speculation) -> bool:
    """Whether linears of this format have weights of `wish.draft_bits` beside their own."""
    if name == "dense":
        return wish.mode == "selfPrecision"
    return wish.mode in {"auto", "selfPrecision"} and name in _OF_PLANES and BITS_OF_FORMAT[name] > wish.draft_bits


def draft_bytes(
    name: FormatName, out_features: int, in_features: int, compute_type: ComputeType, wish: Speculation
) -> int:
    """Bytes that drafting adds to one weight matrix [out_features, in_features]."""
    if not has_draft(name, wish):
        return 0
    if name == "dense":
        return stored_bytes(ANY_PRECISION[wish.draft_bits], out_features, in_features, compute_type)
    return out_features * (1 << wish.draft_bits) * COMPUTE_TYPE_BYTES[compute_type]
