"""The KV cache of one role: a pool of pages allocated once, and the plan of each step over it.

Called by the stage executor: KV operations first, then `plan`, whose Batch the layers read. Knows no model.
"""

from collections.abc import Sequence

import torch

from strata_planner.contract.frames import Segment
from strata_runtime.model.kv.batch import Batch, Span
from strata_runtime.model.kv.pages import PageTables
from strata_runtime.model.kv.pool import PoolShape, make_pool


class PagedKvCache:
    """Keys and values of `num_layers` layers, the first with global number `first_layer`, at 16 or 8 bits. `latent`: one entry for both.

    Memory is layers * pages * page_tokens times what `contract.kv.kv_token_bytes` counts, taken and touched at construction.
    """

    def __init__(  # noqa: PLR0913, the shape of the pool
        self,
        *,
        num_layers: int,
        first_layer: int,
        pages: int,
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_bits: int = 16,
        latent: bool = False,
    ) -> None:
        self._tables = PageTables(pages, page_tokens)
        self._first_layer = first_layer
        self._device = device
        shape = PoolShape(num_layers, pages, page_tokens, kv_heads, head_dim, dtype, device)
        self._pool = make_pool(shape, kv_bits, latent=latent)

    @property
    def bytes(self) -> int:
        return self._pool.bytes

    def plan(self, segments: Sequence[Segment]) -> Batch:
        """Lay out the step in the blocks that its segments bring. The segments' rows are packed in their order.

        Raises StepError for segments that their sequences' tables do not hold; then the step must not run.
        """
        spans: list[Span] = []
        positions: list[int] = []
        places: list[int] = []
        sampled: list[int] = []
        size = self._tables.page_tokens
        for segment in segments:
            end = segment.start + segment.length
            table = self._tables.extend(segment.sequence, segment.blocks, end)
            pages = table[: -(-end // size)]
            spans.append(Span(len(positions), segment.start, segment.length, tuple(pages)))
            covered = range(segment.start, segment.start + segment.length)
            positions.extend(covered)
            places.extend(pages[position // size] * size + position % size for position in covered)
            sampled.extend(range(len(positions) - segment.sample, len(positions)))
        device = self._device
        return Batch(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            places=torch.tensor(places, dtype=torch.int64, device=device),
            sample_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
            spans=tuple(spans),
            page_tokens=size,
            first_layer=self._first_layer,
            layers=self._pool.layers,
        )

    def free(self, sequence: int) -> None:
        """The sequence is over; one that has no pages yet is no error."""
        self._tables.free(sequence)

    def reset(self) -> None:
        """Forget every sequence: a new epoch starts with an empty cache."""
        self._tables.clear()
