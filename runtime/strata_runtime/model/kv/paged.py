"""The KV cache of one role: a pool of pages and of states allocated once, and the plan of each step over it.

Called by the stage executor: KV operations first, then `plan`, whose Batch the layers read. Knows no model.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from strata_planner.contract.frames import Segment
from strata_planner.contract.sequence_state import SequenceState
from strata_runtime.model.kv.batch import Batch, Span
from strata_runtime.model.kv.boundary_log import BoundaryLog
from strata_runtime.model.kv.pages import PageTables
from strata_runtime.model.kv.pool import LayerPool, PoolShape, make_pool, with_pages
from strata_runtime.model.kv.states import StatePool


@dataclass(slots=True)
class HeldPages:
    """What the pages of a cache that has ended hold: of each of its layers, by number, and of its log."""

    layers: dict[int, LayerPool] = field(default_factory=dict)
    log: BoundaryLog | None = None

    def shrink(self, layers: Collection[int], pages: int) -> None:
        """Let go of other layers, and of pages behind so many; layer by layer."""
        for number in list(self.layers):
            held = self.layers.pop(number)
            if number in layers:
                self.layers[number] = with_pages(held, min(pages, held.shape.pages))


class PagedKvCache:
    """Keys and values of `num_layers` layers, the first with global number `first_layer`, at 16 or 8 bits. `latent`: one entry for both.

    `page_major`: how the pool lies; None: as kernels of the device read it (`pool`).

    `awaited`: layers whose pages come from a cache that still serves, with `take`: no memory is taken for them before. `log_hidden`: columns of what the
    stage hands on, which is kept too, of the first `log_pages`.

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
        awaited: Collection[int] = (),
        log_hidden: int = 0,
        log_pages: int = 0,
    ) -> None:
        self._tables = PageTables(pages, page_tokens)
        self._device = device
        self._states = StatePool(states or {}, state_slots, dtype, device)
        layers = [layer for layer in range(first_layer, first_layer + num_layers) if layer not in self._states.layers]
        page_major = device.type == "cuda" if page_major is None else page_major
        self._shape = PoolShape(pages, page_tokens, kv_heads, head_dim, dtype, device, page_major)
        self._kind = kv_bits, latent
        self._numbers = layers
        self._layers: dict[int, LayerPool] = {layer: self._made() for layer in layers if layer not in awaited}
        self.log = BoundaryLog(log_pages, page_tokens, log_hidden, dtype) if log_pages else None
        self.kept_rows = self.log  # whence lost layers begin; of the last stage, what it handed on before it was that

    @property
    def bytes(self) -> int:
        logged = 0 if self.kept_rows is None else self.kept_rows.bytes
        return sum(layer.bytes for layer in self._layers.values()) + self._states.bytes + logged

    @property
    def pools(self) -> Mapping[int, LayerPool]:
        return self._layers

    def held(self) -> HeldPages:
        """What another cache may take when this one has ended."""
        return HeldPages(dict(self._layers), self.log)

    def take(self, held: HeldPages) -> frozenset[int]:
        """Begin with the pages of a cache of the same kind that has ended: of which layers. `held` is emptied; what has other numbers of pages is copied layer by
        layer. Without them every layer begins empty.
        """
        self.reset()
        taken = [layer for layer in self._numbers if layer in held.layers and self._is_like(held.layers[layer])]
        for layer in taken:
            self._layers.pop(layer, None)
            self._layers[layer] = with_pages(held.layers.pop(layer), self._shape.pages)
        held.layers.clear()
        self._layers = {layer: self._layers.get(layer) or self._made() for layer in self._numbers}
        if self.log is not None and held.log is not None:
            self.log.take(held.log)
        self.kept_rows = held.log if self.log is None else self.log
        held.log = None
        return frozenset(taken)

    def _made(self) -> LayerPool:
        bits, latent = self._kind
        return make_pool(self._shape, bits, latent=latent)

    def _is_like(self, held: LayerPool) -> bool:
        return held.kind == self._kind and replace(held.shape, pages=self._shape.pages) == self._shape

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

    @property
    def tables(self) -> Collection[Sequence[int]]:
        """The pages of each sequence."""
        return self._tables.tables

    def free(self, sequence: int) -> Sequence[int]:
        """The sequence is over; one that has no pages yet is no error. Returns those that it had."""
        self._states.free(sequence)
        return self._tables.free(sequence)

    def reset(self) -> None:
        """Forget every sequence; what pages hold is left as it is."""
        self._tables.clear()
        self._states.clear()
