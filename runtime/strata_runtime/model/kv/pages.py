"""Who owns which pages: the bookkeeping of a slot's KV pool, without tensors.

Used by PagedKvCache alone. A page holds the keys and values of `page_tokens` consecutive positions of one sequence, for
every layer of the slot. A page belongs to one sequence or is free; nothing is shared.
"""

from strata_runtime.errors import PoolExhaustedError, StepError


class PageTable:
    """Pages 0..pages-1, their owners, and how many positions of each sequence are written."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages - 1, -1, -1))  # the lowest page is taken first
        self._owned: dict[int, list[int]] = {}
        self._length: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._owned)

    def length(self, sequence: int) -> int:
        """Positions of `sequence` that are written; 0 for one that is not known."""
        return self._length.get(sequence, 0)

    def owned(self, sequence: int) -> list[int]:
        """The pages of `sequence` in the order of its positions; the caller leaves the list as it is."""
        return self._owned.get(sequence, [])

    def extend(self, sequence: int, start: int, length: int) -> list[int]:
        """Make room for positions start..start+length-1 and count them as written. Returns the sequence's pages.

        What lay behind `start` is forgotten, as after rejected drafts, and pages that hold none of the rest return to the pool. Raises StepError for a gap,
        PoolExhaustedError (nothing is changed then) if the pool has too few pages.
        """
        if length < 1 or start < 0 or start > self.length(sequence):
            raise StepError(
                f"sequence {sequence}: {length} tokens at position {start}, but {self.length(sequence)} positions are "
                "written: a segment starts within them or right after, and is not empty"
            )
        owned = self._owned.setdefault(sequence, [])
        self._take(sequence, owned, self._pages_for(start + length) - len(owned))
        self._shrink(sequence, start + length)
        return owned

    def free(self, sequence: int) -> None:
        """The sequence is over. One that never had a page is no error: it may end before its first step."""
        self._free.extend(reversed(self._owned.pop(sequence, [])))
        self._length.pop(sequence, None)

    def integrity(self) -> None:
        """Raises AssertionError unless every page is free or owned exactly once and no sequence owns too many or few."""
        seen = sorted(self._free + [page for owned in self._owned.values() for page in owned])
        assert seen == list(range(self.pages)), f"pages lost or owned twice: {seen}"
        assert self._owned.keys() == self._length.keys(), "a sequence without a length"
        for sequence, owned in self._owned.items():
            assert len(owned) == self._pages_for(self._length[sequence]), f"sequence {sequence} owns {owned}"

    def _take(self, sequence: int, owned: list[int], count: int) -> None:
        if count > len(self._free):
            if sequence not in self._length:
                del self._owned[sequence]
            raise PoolExhaustedError(
                f"sequence {sequence} needs {count} more pages of {self.page_tokens} tokens; {len(self._free)} of this "
                f"slot's {self.pages} are free: admit fewer tokens or give the slot a larger KV budget"
            )
        owned.extend(self._free.pop() for _ in range(count))

    def _shrink(self, sequence: int, length: int) -> None:
        owned = self._owned[sequence]
        keep = self._pages_for(length)
        self._free.extend(reversed(owned[keep:]))
        del owned[keep:]
        self._length[sequence] = length

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_tokens)
