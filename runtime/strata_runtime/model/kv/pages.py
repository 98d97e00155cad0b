"""Which pages of a slot's KV pool hold which positions: the bookkeeping of what the leader says, without tensors.

Used by PagedKvCache alone. A page holds the keys and values of `page_tokens` consecutive positions for every layer of the slot. Who gets
which page is decided by the leader's scheduler: here nothing is given out, and a page may be in several tables.
"""

from collections.abc import Collection, Sequence

from strata_runtime.errors import StepError


class PageTables:
    """Tables of pages 0..pages-1, one of each sequence, in the order of its positions."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._tables)

    def extend(self, sequence: int, appended: Sequence[int], end: int) -> list[int]:
        """The sequence's table with these pages behind it; the caller leaves the list as it is.

        Raises StepError for a page that is none, and for a table that does not reach position `end`: nothing is changed then.
        """
        strange = next((page for page in appended if not 0 <= page < self.pages), None)
        if strange is not None:
            raise StepError(f"sequence {sequence} was given page {strange}; this slot has pages 0..{self.pages - 1}")
        table = self._tables.get(sequence, [])
        count = len(table) + len(appended)
        if not 0 < end <= count * self.page_tokens or count > self.pages:
            raise StepError(
                f"sequence {sequence}: its segment ends at position {end} and its table has {count} pages of {self.page_tokens} tokens; "
                f"a segment is not empty and ends within its table, which has each of the slot's {self.pages} pages at most once"
            )
        table.extend(appended)
        self._tables[sequence] = table
        return table

    @property
    def tables(self) -> Collection[Sequence[int]]:
        return self._tables.values()

    def free(self, sequence: int) -> Sequence[int]:
        """The sequence is over; its pages. One that never had a page is no error: it may end before its first step."""
        return self._tables.pop(sequence, [])

    def clear(self) -> None:
        self._tables.clear()
