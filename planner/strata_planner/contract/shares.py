"""Shares: how the ranks of a stage deal out what it has: heads, columns of an MLP, experts, rows of a vocabulary.

The runtime cuts by this arithmetic and the planner counts by it, so that both mean the same bytes. Shares are whole numbers in proportion, one for each rank:
(5, 3) gives the first rank five of eight key heads. What does not divide goes to whom most of a thing is lacking, of equals to the first ones; nobody
has nothing while there is one for each. Knows no tensor and no model.
"""

from itertools import accumulate
from math import gcd

Shares = tuple[int, ...]  # of each rank, above 0; none at all: equal ones
Range = tuple[int, int]  # first, and behind the last

TILE = 64  # columns of an MLP that stay together: what kernels take at once, and bit-planes are padded to
_TILES = (TILE, 32, 8, 1)
_VOCABULARY_TILE = 32  # outputs that a packed head multiplies at once


def equal(ranks: int) -> Shares:
    return (1,) * ranks


def of_ranks(shares: Shares, ranks: int) -> Shares:
    """One for each rank, where none are told too."""
    return shares or equal(ranks)


def lowest(shares: Shares) -> Shares:
    """The same proportions in the smallest numbers; none at all where they are equal."""
    divisor = gcd(*shares)
    found = tuple(each // divisor for each in shares)
    return () if set(found) <= {1} else found


def told(shares: Shares) -> str:
    """As people read them: "5:3"."""
    return ":".join(map(str, shares))


def problem_of(shares: Shares, ranks: int) -> str:
    """What is wrong with them, empty: nothing."""
    if shares and len(shares) != ranks:
        return f"shares {told(shares)} of {ranks} devices: one for each device, or none for equal ones"
    if any(each < 1 for each in shares):
        return f"shares {told(shares)}: each is a whole number above 0"
    return ""


def dealt(count: int, shares: Shares) -> tuple[int, ...]:
    """How many of `count` things in a row each rank has."""
    whole = sum(shares)
    parts = [count * share // whole for share in shares]
    lacking = sorted(range(len(shares)), key=lambda rank: (-(count * shares[rank] % whole), rank))
    for rank in lacking[: count - sum(parts)]:
        parts[rank] += 1
    while count >= len(shares) and 0 in parts:
        parts[max(range(len(parts)), key=lambda rank: (parts[rank], -shares[rank]))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


def part(count: int, shares: Shares, rank: int) -> Range:
    """Which of `count` things in a row a rank has."""
    ends = [0, *accumulate(dealt(count, shares))]
    return ends[rank], ends[rank + 1]


def key_heads(keys: int, shares: Shares, rank: int) -> Range:
    """Whole ones; where ranks outnumber them several hold the same one."""
    if len(shares) <= keys:
        return part(keys, shares, rank)
    head = sharers(keys, len(shares), rank)[0]
    return head, head + 1


def query_heads(queries: int, keys: int, shares: Shares, rank: int) -> Range:
    """All those of its key heads, or its share of those of the one that it shares."""
    group = queries // keys
    if len(shares) <= keys:
        first, last = part(keys, shares, rank)
        return first * group, last * group
    head, first, last = sharers(keys, len(shares), rank)
    begin, end = part(group, shares[first:last], rank - first)
    return head * group + begin, head * group + end


def sharers(keys: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """The one key head of a rank, where ranks outnumber them, and the ranks that hold it: the first, and behind the last."""
    for head in range(keys):
        first, last = part(ranks, equal(keys), head)
        if first <= rank < last:
            return head, first, last
    raise AssertionError((keys, ranks, rank))


def columns(width: int, shares: Shares, rank: int) -> Range:
    """Of the `width` columns between the two halves of an MLP: whole tiles, where there are enough for all."""
    tile = max((each for each in _TILES if -(-width // each) >= len(shares)), default=1)
    return _in_tiles(width, tile, shares, rank)


def vocabulary(size: int, shares: Shares, rank: int) -> Range:
    """Of the rows of an embedding or a head."""
    return _in_tiles(size, _VOCABULARY_TILE if size >= _VOCABULARY_TILE * len(shares) else 1, shares, rank)


def _in_tiles(count: int, tile: int, shares: Shares, rank: int) -> Range:
    first, last = part(-(-count // tile), shares, rank)
    return first * tile, min(last * tile, count)
