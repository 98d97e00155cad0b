"""The KV cache of one role: a pool of pages and of states allocated once, and the plan of each step over it.

Called by the stage executor: KV operations first, then `plan`, whose Batch the layers read. Knows no model.
"""

from collections.abc import Mapping, Sequence

import torch

from strata_planner.contract.frames import Segment
from strata_planner.contract.sequence_state import SequenceState
from strata_runtime.model.kv.batch import Batch, Span
from strata_runtime.model.kv.pages import PageTables
from strata_runtime.model.kv.pool import PoolShape, make_pool
from strata_runtime.model.kv.states import StatePool


class PagedKvCache:
    """Keys and values of `num_layers` layers, the first with global number `first_layer`, at 16 or 8 bits. `latent`: one entry for both.

    `page_major`: how the pool lies; None: as kernels of the device read it (`pool`).

    `states`: what sequences keep in those of the layers that have no keys and values, by their global numbers, for `state_slots` sequences.

    Memory is layers with keys * pages * page_tokens times what `contract.kv.kv_token_bytes` counts, and
    `state_slots` times what `contract.sequence_state` does, taken and touched at construction.
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
        states: Mapping[int, SequenceState] | None = None,
        state_slots: int = 0,
        page_major: bool | None = None,
    ) -> None:
        self._tables = PageTables(pages, page_tokens)
        self._device = device
        self._states = StatePool(states or {}, state_slots, dtype, device)
        layers = [layer for layer in range(first_layer, first_layer + num_layers) if layer not in self._states.layers]
        page_major = device.type == "cuda" if page_major is None else page_major
        shape = PoolShape(len(layers), pages, page_tokens, kv_heads, head_dim, dtype, device, page_major)
        self._pool = make_pool(shape, kv_bits, latent=latent)
        self._layers = dict(zip(layers, self._pool.layers, strict=True))

    @property
    def bytes(self) -> int:
        return self._pool.bytes + self._states.bytes

    def plan(self, segments: Sequence[Segment]) -> Batch:
        """Lay out the step in the blocks that its segments bring. The segments' rows are packed in their order.

        Raises StepError for segments that their sequences' tables do not hold, or that do not go on from their sequences' states; then the step
        must not run.
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
            layers=self._layers,
            states=self._states.layers,
            state_runs=self._states.plan(segments),
        )

    def free(self, sequence: int) -> None:
        """The sequence is over; one that has no pages yet is no error."""
        self._tables.free(sequence)
        self._states.free(sequence)

    def reset(self) -> None:
        """Forget every sequence: a new epoch starts with an empty cache."""
        self._tables.clear()
        self._states.clear()
