"""The blocks of a replica's KV pool: who holds which, which are known by what they hold, which are taken next. Used by the scheduler.

A block is `page_tokens` positions in every stage's pool, under one number. One that is full has a name: a digest of its tokens and of
all before them. A block with a name is shared by whoever needs it, and keeps it when nobody holds it any more, until it is taken for
something else: those without a name first, then the one that was given back longest ago. What an epoch leaves to the next has blocks that are not full:
the sequence that has their tokens goes on in them. Knows no tensors.
"""

from collections.abc import Iterable, Sequence

from msgspec import structs

from strata_planner.contract.block_names import alike, name_of
from strata_planner.contract.frames import HeldBlock, Segment


class BlockPool:
    """Blocks 0..count-1. A block is held so many times as it was taken or shared and not given back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held = [0] * count
        self._unnamed = list(range(count - 1, -1, -1))  # free ones; the lowest is taken first
        self._kept: dict[int, None] = {}  # free ones with a name, longest free first
        self._names: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._begun: dict[
            bytes, dict[int, bytes]
        ] = {}  # by what is before them: kept ones that nothing follows, with their tokens
        self.drafted: set[int] = set()  # blocks that are full in the pool of the model that drafts, too
        self.lacking: set[int] = set()  # blocks that some layers are to compute again before anybody reads them

    @property
    def free(self) -> int:
        """Blocks that can be taken: nobody holds them."""
        return len(self._unnamed) + len(self._kept)

    @property
    def has_begun(self) -> bool:
        """Whether some may be kept that a sequence can go on in."""
        return bool(self._begun)

    def find(self, name: bytes) -> int | None:
        return self._blocks.get(name)

    def is_held(self, block: int) -> bool:
        return self._held[block] > 0

    def take(self, count: int) -> list[int]:
        """`count` <= `free` blocks for one holder each. Names that these had are forgotten."""
        taken = []
        for _ in range(count):
            if self._unnamed:
                block = self._unnamed.pop()
            else:
                block = next(iter(self._kept))
                del self._kept[block]
                del self._blocks[self._names.pop(block)]
            self._held[block] = 1
            self.drafted.discard(block)
            self.lacking.discard(block)
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more holds a block that has a name."""
        self._kept.pop(block, None)
        self._held[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """A held block is full. Where another block has that name already, this one stays without."""
        if name not in self._blocks:
            self._names[block] = name
            self._blocks[name] = block

    def inherit(self, blocks: Iterable[HeldBlock], *, lacking: bool) -> None:
        """What blocks hold under these numbers already, those that are to be taken first at the front; blocks that this pool has not are left out. Before any is
        taken. `lacking`: each of them.
        """
        for each in blocks:
            name = name_of(each.name, each.tokens) if each.tokens else each.name
            if each.block >= self.count or name in self._blocks:
                continue
            self._names[each.block] = name
            self._blocks[name] = each.block
            self._kept[each.block] = None
            if each.tokens:
                self._begun.setdefault(each.name, {})[each.block] = each.tokens
        self._unnamed = [block for block in self._unnamed if block not in self._kept]
        self.lacking = set(self._kept) if lacking else set()

    def go_on(self, parent: bytes, tokens: bytes) -> tuple[int, int] | None:
        """A free block that somebody had filled, or begun to, behind the block `parent`, with most of these packed tokens: the caller's alone from now on. With
        how many of them.
        """
        begun = self._begun.get(parent, {})
        counts = {
            block: alike(held, tokens)
            for block, held in begun.items()
            if block in self._kept and self._names[block] == name_of(parent, held)  # else it was taken since
        }
        block = max(counts, key=lambda each: counts[each], default=-1)
        if not counts.get(block):
            return None
        del begun[block], self._kept[block], self._blocks[self._names.pop(block)]
        if not begun:
            del self._begun[parent]
        self._held[block] = 1
        return block, counts[block]

    def give_back(self, blocks: Sequence[int]) -> None:
        """By one holder, in the order of its positions: the last are the first to be taken again."""
        for block in reversed(blocks):
            self._held[block] -= 1
            if self._held[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                self._unnamed.append(block)
                self.lacking.discard(block)

    def forget_names(self) -> None:
        """What the blocks hold is not what anybody would compute now: nothing of it is shared any more."""
        self._names.clear()
        self._blocks.clear()
        self._begun.clear()
        self.lacking.clear()
        self._unnamed.extend(self._kept)
        self._kept.clear()

    def integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless these tables hold each block as often as it says, and every other block is free once."""
        counts = [0] * self.count
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block in table:
                counts[block] += 1
        assert counts == self._held, "a block is held by more or fewer than it says"
        free = sorted([*self._unnamed, *self._kept])
        assert free == [block for block in range(self.count) if not counts[block]], "a block is lost, or free twice"
        assert {name: block for block, name in self._names.items()} == self._blocks, "a name without its block"
        assert self._kept.keys() <= self._names.keys(), "a block is kept for a name that it does not have"
        held = {block for block, count in enumerate(counts) if count}
        assert self.lacking <= self._names.keys() | held, "a block that nobody can find is to be computed again"
        assert not set(self._unnamed) & self._names.keys(), "a block that can be found is taken as if it had no name"


class OwnBlocks:
    """Blocks for sequences that no scheduler runs: as many as their lengths need, none shared. For calibration, measuring and tests."""

    def __init__(self, count: int, page_tokens: int) -> None:
        self.pool = BlockPool(count)
        self._page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}

    def deal(self, segments: Iterable[Segment]) -> list[Segment]:
        """The same segments with the blocks that their sequences' tables lack."""
        return [structs.replace(segment, blocks=tuple(self._more(segment))) for segment in segments]

    def _more(self, segment: Segment) -> list[int]:
        table = self._tables.setdefault(segment.sequence, [])
        pages = -(-(segment.start + segment.length) // self._page_tokens)
        taken = self.pool.take(max(0, pages - len(table)))
        table.extend(taken)
        return taken

    def free(self, sequence: int) -> None:
        self.pool.give_back(self._tables.pop(sequence, []))
