"""What the blocks of a stage's pages hold: which tokens behind which, as the stage itself has computed them. Kept by `stage.holdings`.

Known of a block is what was written there since its first position, behind a block that is known: so nothing that other weights have left is ever taken for what these
compute, and no stage needs another's word. Pure; knows no tensors.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from strata_planner.contract.block_names import TOKEN_BYTES, alike, name_of
from strata_planner.contract.frames import HeldBlock


class Content(NamedTuple):
    """`tokens`, packed, from the block's first position on, behind the block or root `parent`. `name`: of a full block, else empty."""

    parent: bytes
    tokens: bytes
    name: bytes


class Contents:
    """By block, those that were written or given back last at the end."""

    def __init__(self, page_tokens: int) -> None:
        self._size = page_tokens
        self._blocks: dict[int, Content] = {}

    @property
    def blocks(self) -> Mapping[int, Content]:
        return self._blocks

    def begin(self, blocks: Mapping[int, Content]) -> None:
        self._blocks = dict(blocks)

    def forget(self, blocks: Collection[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)

    def write(self, table: Sequence[int], root: bytes, start: int, tokens: bytes) -> None:
        """These tokens were computed at the positions from `start` on of a sequence with this table, whose first block stands behind `root`."""
        end = start + len(tokens) // TOKEN_BYTES
        for place in range(start // self._size, -(-end // self._size)):
            first = place * self._size
            part = tokens[max(first - start, 0) * TOKEN_BYTES : (first + self._size - start) * TOKEN_BYTES]
            parent = self._name(table[place - 1]) if place else root
            self._fill(table[place], parent, max(start - first, 0), part)

    def _name(self, block: int) -> bytes:
        held = self._blocks.get(block)
        return held.name if held else b""

    def _fill(self, block: int, parent: bytes, offset: int, tokens: bytes) -> None:
        held = self._blocks.pop(block, None)
        kept = held.tokens[: offset * TOKEN_BYTES] if held is not None and held.parent == parent else b""
        if not parent or len(kept) < offset * TOKEN_BYTES:  # it follows from what nobody knows
            return
        tokens = kept + tokens
        name = name_of(parent, tokens) if len(tokens) == self._size * TOKEN_BYTES else b""
        self._blocks[block] = Content(parent, tokens, name)

    def spoil(self, table: Sequence[int], start: int) -> None:
        """Behind that position of its sequence lies anything."""
        for place in range(start // self._size, len(table)):
            held, kept = self._blocks.pop(table[place], None), max(start - place * self._size, 0) * TOKEN_BYTES
            if held is not None and kept:
                self._blocks[table[place]] = Content(held.parent, held.tokens[:kept], b"")

    def give_back(self, table: Sequence[int]) -> None:
        """A sequence is over. What it shared is kept, the last first to go; nobody goes on in the block that it has not filled."""
        for block in reversed(table):
            if (held := self._blocks.pop(block, None)) is not None and held.name:
                self._blocks[block] = held

    def left(self, tables: Collection[Sequence[int]]) -> dict[int, Content]:
        """At the end of an epoch, while sequences with these tables run: what is to be known in the next one, longest unused first."""
        running = [block for table in tables for block in reversed(table)]
        last = {block: self._blocks[block] for block in running if block in self._blocks}
        return {block: held for block, held in self._blocks.items() if held.name and block not in last} | last


def told(blocks: Mapping[int, Content]) -> list[HeldBlock]:
    """To other stages. Blocks that nothing follows are told by their tokens: whoever is a step behind has less of them."""
    followed = {held.parent for held in blocks.values()}
    return [
        HeldBlock(block, held.name) if held.name in followed else HeldBlock(block, held.parent, held.tokens)
        for block, held in blocks.items()
    ]


def both(one: Mapping[int, Content], other: Mapping[int, Content]) -> dict[int, Content]:
    """What these blocks hold in either, in the order of the first."""
    found = {}
    for block, held in one.items():
        its = other.get(block)
        if its is not None and its.parent == held.parent and (count := alike(held.tokens, its.tokens)):
            whole = count * TOKEN_BYTES == len(held.tokens)
            found[block] = held if whole else Content(held.parent, held.tokens[: count * TOKEN_BYTES], b"")
    return found


def in_common(blocks: Sequence[HeldBlock], mine: Mapping[int, Content]) -> list[HeldBlock]:
    """What these blocks hold in the stages that have told of them, and in this one: of those told by their tokens, as far as these are the same."""
    found = []
    for each in blocks:
        held = mine.get(each.block)
        if held is None:
            continue
        if not each.tokens:
            found += [each] if held.name == each.name else []
        elif held.parent == each.name and (count := alike(each.tokens, held.tokens)):
            found.append(HeldBlock(each.block, each.name, each.tokens[: count * TOKEN_BYTES]))
    return found
