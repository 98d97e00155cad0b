"""A KV cache that finds blocks for its own sequences, for tests that have no scheduler."""

from collections.abc import Sequence
from typing import Any

from strata_planner.contract.frames import Segment
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.model.kv.batch import Batch
from strata_runtime.scheduler.blocks import OwnBlocks


class DealtCache(PagedKvCache):
    """As PagedKvCache, for segments that bring no blocks."""

    def __init__(self, *, pages: int, page_tokens: int, **shape: Any) -> None:
        super().__init__(pages=pages, page_tokens=page_tokens, **shape)
        self.own = OwnBlocks(pages, page_tokens)

    def plan(self, segments: Sequence[Segment]) -> Batch:
        return super().plan([each if each.blocks else self.own.deal([each])[0] for each in segments])
