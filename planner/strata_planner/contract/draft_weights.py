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
    plane_columns,
    stored_bytes,
)
from strata_planner.contract.plan import Speculation

_OF_PLANES = frozenset(ANY_PRECISION.values())


def draft_wish(wish: Speculation) -> tuple[int, bool]:
    """What of it decides which layers draft: the bits, 0 for none, and whether 16-bit layers do too."""
    is_named = wish.mode == "selfPrecision"
    is_auto = wish.mode == "auto" and not wish.draft_uri
    return (wish.draft_bits if is_named or is_auto else 0, is_named)


def has_draft(name: FormatName, wish: Speculation) -> bool:
    """Whether linears of this format have weights of `wish.draft_bits` beside their own."""
    bits, also_dense = draft_wish(wish)
    return also_dense if name == "dense" else name in _OF_PLANES and 0 < bits < BITS_OF_FORMAT[name]


def draft_bytes(
    name: FormatName, out_features: int, in_features: int, compute_type: ComputeType, wish: Speculation
) -> int:
    """Bytes that drafting adds to one weight matrix [out_features, in_features]."""
    if not has_draft(name, wish):
        return 0
    if name == "dense":
        return stored_bytes(ANY_PRECISION[wish.draft_bits], out_features, in_features, compute_type)
    return out_features * (1 << wish.draft_bits) * COMPUTE_TYPE_BYTES[compute_type]


def kept_bytes(
    before: FormatName, after: FormatName, shape: tuple[int, int], compute_type: ComputeType, wish: Speculation
) -> int:
    """Bytes of a matrix [N, K] and of what it drafts with that stay where they are when it moves between planes of any precision and 16 bits."""
    out_features, in_features = shape
    drafted, drafts, bits = has_draft(before, wish), has_draft(after, wish), wish.draft_bits
    planes, is_table_kept = 0, False
    if before.startswith("any"):
        held = BITS_OF_FORMAT[before]
        wanted = BITS_OF_FORMAT[after] if after in _OF_PLANES else bits if drafts and held >= bits else 0
        planes = min(held, wanted)
        is_table_kept = drafts and (drafted or held == bits)
    elif before == "dense":
        is_table_kept = drafted and drafts
    tables = is_table_kept * (1 << bits) * COMPUTE_TYPE_BYTES[compute_type]
    return out_features * (planes * plane_columns(in_features) // 8 + tables)
