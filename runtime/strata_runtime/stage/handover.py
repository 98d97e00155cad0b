"""KV pages that follow their layers to another slot: what one gives, and what one gets.

Full blocks are given while the old epoch serves, copied between its steps; what has changed since then, once it has ended. Who gets pages believes them as far as the
survey does: by the weights that computed them. What was not handed over is computed again. Used by `slot.giver` and `slot.gathering`; knows no sockets.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata_planner.contract.block_names import TOKEN_BYTES, name_of
from strata_planner.contract.frames import LARGEST_PART_BYTES, MOST_HANDED_BLOCKS, HeldBlock, KvPages, WantPages
from strata_runtime.errors import StepError
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.stage.contents import Content
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.inheritance import Inheritance

PART_BYTES = 1 << 20  # of a message, if a page is not larger: a step waits while so much is copied

Blocks = Mapping[int, Content]


class Pages(Protocol):
    """Of a role: what its pages hold, of which layers."""

    @property
    def replica(self) -> int: ...

    @property
    def holds(self) -> Inheritance:
        """Now; blocks that were used last at the end."""

    def pool(self, layer: int) -> LayerPool | None: ...

    def copied(self, layer: int, blocks: Blocks) -> tuple[Blocks, list[torch.Tensor]]:
        """Those of the blocks that still hold this, with their pages: tensors [2, kv_heads, blocks, page_tokens, ...]."""


class LivePages:
    """Of a role that serves: read between its steps."""

    def __init__(self, executor: StageExecutor, formed: int) -> None:
        self._executor, self._formed = executor, formed
        self.replica = executor.role.replica

    @property
    def holds(self) -> Inheritance:
        return self._executor.holds(self._formed)

    def pool(self, layer: int) -> LayerPool | None:
        return self._executor.pools.get(layer)

    def copied(self, layer: int, blocks: Blocks) -> tuple[Blocks, list[torch.Tensor]]:
        def copy() -> tuple[Blocks, list[torch.Tensor]]:
            now = self._executor.blocks
            same = {block: held for block, held in blocks.items() if now.get(block) == held}
            return same, _pages_of(self._executor.pools[layer], list(same))

        return self._executor.boundary.read(copy)


@dataclass(frozen=True, slots=True)
class LeftPages:
    """Of a role that has ended: layers that nobody of its slot has taken."""

    replica: int
    holds: Inheritance
    pools: dict[int, LayerPool]

    def pool(self, layer: int) -> LayerPool | None:
        return self.pools.get(layer)

    def copied(self, layer: int, blocks: Blocks) -> tuple[Blocks, list[torch.Tensor]]:
        return blocks, _pages_of(self.pools[layer], list(blocks))


class Outgoing:
    """Pages for one role of another slot: what it has had, and what of the round that it has asked for is still to come."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, str], dict[int, Content]] = {}  # by layer and weights
        self._round: Iterator[tuple[KvPages, list[torch.Tensor]]] | None = None

    def begin_anew(self) -> None:
        """The roles whose pages these are have ended."""
        self._round = None

    def part(self, want: WantPages, pages: Collection[Pages]) -> tuple[KvPages, list[torch.Tensor]] | None:
        """The next of the round; None: it is over."""
        if self._round is None:
            self._round = self._messages(want, pages)
        part = next(self._round, None)
        if part is None:
            self._round = None
        return part

    def _messages(self, want: WantPages, pages: Collection[Pages]) -> Iterator[tuple[KvPages, list[torch.Tensor]]]:
        for layer in want.layers:
            for each in pages:
                pool, holds = each.pool(layer), each.holds
                if each.replica == want.replica and pool is not None and layer in holds.through:
                    yield from self._of_layer(want, layer, pool, each)

    def _of_layer(
        self, want: WantPages, layer: int, pool: LayerPool, pages: Pages
    ) -> Iterator[tuple[KvPages, list[torch.Tensor]]]:
        holds = pages.holds
        sent = self._sent.setdefault((layer, holds.through[layer]), {})
        largest = max(page_bytes(each) for each in paged(pool))
        if largest > LARGEST_PART_BYTES:
            return
        at_once = max(1, min(MOST_HANDED_BLOCKS, PART_BYTES // largest))
        numbers = [
            block
            for block, held in holds.blocks.items()
            if (want.rest or held.name) and block < pool.shape.pages and sent.get(block) != held
        ]
        for begin in range(0, len(numbers), at_once):
            wanted = {block: holds.blocks[block] for block in numbers[begin : begin + at_once]}
            same, tensors = pages.copied(layer, wanted)
            sent.update(same)
            told = [HeldBlock(block, held.parent, held.tokens) for block, held in same.items()]
            if told:
                yield (
                    KvPages(
                        epoch=want.epoch,
                        layer=layer,
                        kv_bits=pool.kind[0],
                        weights=holds.through[layer],
                        formed=holds.formed,
                        before=holds.before,
                        blocks=told,
                    ),
                    tensors,
                )


class Arriving:
    """What a role has got. Its pages are written as they come: nobody computes before the survey, and no survey is answered before all is there."""

    def __init__(self, pools: Mapping[int, LayerPool], page_tokens: int) -> None:
        """`pools`: of the layers that are to come."""
        self._pools, self._full_bytes = pools, page_tokens * TOKEN_BYTES
        self._layers: dict[int, Inheritance] = {}
        self._refused: set[int] = set()  # layers of which two different things came

    def take(self, pages: KvPages, bodies: Sequence[memoryview]) -> None:
        """Raises StepError for tensors that are none of such pages."""
        layer, pool = pages.layer, self._pools.get(pages.layer)
        numbers = [each.block for each in pages.blocks]
        if pool is None or pages.kv_bits != pool.kind[0]:
            return
        fits = [place for place, number in enumerate(numbers) if number < pool.shape.pages]
        known = self._layers.get(layer, Inheritance(pages.before, pages.formed, {layer: pages.weights}))
        if (known.before, known.formed, known.through[layer]) != (pages.before, pages.formed, pages.weights):
            self._refused.add(layer)
            return
        tensors = paged(pool)
        wanted = [page_bytes(each) * len(numbers) for each in tensors]
        if [len(body) for body in bodies] != wanted:
            raise StepError(
                f"pages of layer {layer}: tensors of {[len(body) for body in bodies]} bytes for {len(numbers)} blocks; {wanted} are"
            )
        target = torch.tensor([numbers[place] for place in fits], dtype=torch.long)
        source = torch.tensor(fits, dtype=torch.long)
        for tensor, body in zip(tensors, bodies, strict=True):
            shape = (*tensor.shape[:2], len(numbers), *tensor.shape[3:])
            came = torch.frombuffer(body, dtype=tensor.dtype).view(shape)
            came = came if len(fits) == len(numbers) else came.index_select(2, source)
            tensor.index_copy_(2, target.to(tensor.device), came.to(tensor.device))
        held = {
            each.block: Content(
                each.name, each.tokens, name_of(each.name, each.tokens) if len(each.tokens) == self._full_bytes else b""
            )
            for each in (pages.blocks[place] for place in fits)
        }
        # In the giver's order: what it has used last at the end.
        self._layers[layer] = known.holding({**{at: one for at, one in known.blocks.items() if at not in held}, **held})

    def joined(self, kept: Inheritance) -> Inheritance:
        """What the stage holds now. `kept`: of the own slot, which was not written over."""
        held = kept
        for layer, each in sorted(self._layers.items()):
            if layer not in self._refused and layer not in kept.through:
                held = held.joined(each)
        return held


def paged(pool: LayerPool) -> list[torch.Tensor]:
    """What it stores as [2, kv_heads, pages, page_tokens, ...]."""
    return [
        tensor.view(*tensor.shape[:2], pool.shape.pages, pool.shape.page_tokens, *tensor.shape[3:])
        for tensor in pool.storage
    ]


def page_bytes(tensor: torch.Tensor) -> int:
    """tensor: as of `paged`."""
    return tensor.nbytes // tensor.shape[2]


def _pages_of(pool: LayerPool, blocks: list[int]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [
            each.index_select(2, torch.tensor(blocks, dtype=torch.long, device=each.device)).cpu().contiguous()
            for each in paged(pool)
        ]
