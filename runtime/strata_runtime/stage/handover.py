"""KV pages that follow their layers to a neighbouring stage when a replica is formed anew, before its first step: what one gives, and what one gets.

A stage that took the pages of an ended role sends those of layers that it has no more: of earlier layers to the stage before it, of later ones to the one behind. Who
gets them believes them as far as the survey does: by the weights that computed them. What was not handed over is computed again. Used by workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from strata_planner.contract.block_names import TOKEN_BYTES, name_of
from strata_planner.contract.frames import LARGEST_PART_BYTES, MOST_HANDED_BLOCKS, Handover, HeldBlock, KvPages, Survey
from strata_planner.contract.roles import Role
from strata_runtime.errors import StepError
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.stage.contents import Content
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.inheritance import Inheritance

MOST_BYTES = 256 << 20  # that a stage gives: they may all wait in a neighbour's memory, and everybody waits for them

Side = Literal["before", "behind"]


def why_not_given(page_bytes: Sequence[int], largest_part: int, blocks: int) -> str:
    """Why a stage computes layers again, where one before has them. `page_bytes`: of each layer, `largest_part`: of a page's tensors. Empty: they are given."""
    total = sum(page_bytes) * blocks
    reasons = {
        "no layer leaves": not page_bytes,
        "it is not known what the blocks hold": not blocks,
        f"a page of {largest_part} bytes is more than a message of {LARGEST_PART_BYTES}": largest_part
        > LARGEST_PART_BYTES,
        f"{total} bytes are more than {MOST_BYTES}": total > MOST_BYTES,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(slots=True)
class Leaving:
    """Of a role that has ended: layers that this slot's next one has not, and what their blocks hold. Given once."""

    inherited: Inheritance = field(default_factory=Inheritance)
    pools: dict[int, LayerPool] = field(default_factory=dict)

    def messages(self, role: Role, epoch: int) -> Iterator[tuple[Side, KvPages, list[torch.Tensor]]]:
        """To which neighbour of `role` goes what: tensors [2, kv_heads, blocks, page_tokens, ...]. A layer's memory is free when all of it is out."""
        pools = {number: pool for number, pool in self.pools.items() if number in self.inherited.through}
        self.pools = {}
        pages = min((pool.shape.pages for pool in pools.values()), default=0)
        blocks = {block: held for block, held in self.inherited.blocks.items() if block < pages}
        largest = max((_page_bytes(each) for pool in pools.values() for each in _paged(pool)), default=0)
        if why_not_given([pool.bytes // pool.shape.pages for pool in pools.values()], largest, len(blocks)):
            return
        at_once = min(MOST_HANDED_BLOCKS, LARGEST_PART_BYTES // largest)
        numbers = list(blocks)
        for layer in sorted(pools):
            pool = pools.pop(layer)
            for begin in range(0, len(numbers), at_once):
                part = numbers[begin : begin + at_once]
                told = [HeldBlock(block, blocks[block].parent, blocks[block].tokens) for block in part]
                yield (
                    "before" if layer < role.layers[0] else "behind",
                    KvPages(
                        replica=role.replica,
                        epoch=epoch,
                        layer=layer,
                        kv_bits=pool.kind[0],
                        weights=self.inherited.through[layer],
                        formed=self.inherited.formed,
                        before=self.inherited.before,
                        blocks=told,
                    ),
                    [each.index_select(2, torch.tensor(part, device=each.device)) for each in _paged(pool)],
                )


class Arriving:
    """What a stage has got. Its pages are written as they come: nobody computes before the survey, and no survey is answered before all is there."""

    def __init__(self, role: Role, pools: Mapping[int, LayerPool], kept: Inheritance) -> None:
        """`pools`: of the stage's layers. `kept`: of the own slot, which is not written over."""
        self._role, self._pools, self._kept = role, pools, kept
        self._messages = 0
        self._layers: dict[int, Inheritance] = {}
        self._refused: set[int] = set()  # layers of which two different things came

    def take(self, pages: KvPages, bodies: Sequence[memoryview]) -> None:
        """Raises StepError for tensors that are none of such pages."""
        self._messages += 1
        layer, pool = pages.layer, self._pools.get(pages.layer)
        numbers = [each.block for each in pages.blocks]
        if pool is None or layer in self._kept.through or pages.kv_bits != pool.kind[0]:
            return
        fits = [place for place, number in enumerate(numbers) if number < pool.shape.pages]
        known = self._layers.get(layer, Inheritance(pages.before, pages.formed, {layer: pages.weights}))
        if (known.before, known.formed, known.through[layer]) != (pages.before, pages.formed, pages.weights):
            self._refused.add(layer)
            return
        tensors = _paged(pool)
        wanted = [_page_bytes(each) * len(numbers) for each in tensors]
        if [len(body) for body in bodies] != wanted:
            raise StepError(
                f"pages of layer {layer}: tensors of {[len(body) for body in bodies]} bytes for {len(numbers)} blocks; {wanted} are"
            )
        target = torch.tensor([numbers[place] for place in fits])
        source = torch.tensor(fits)
        for tensor, body in zip(tensors, bodies, strict=True):
            shape = (*tensor.shape[:2], len(numbers), *tensor.shape[3:])
            came = torch.frombuffer(bytearray(body), dtype=tensor.dtype).view(shape).index_select(2, source)
            tensor.index_copy_(2, target.to(tensor.device), came.to(tensor.device))
        size = self._role.page_tokens * TOKEN_BYTES
        held = {
            each.block: Content(
                each.name, each.tokens, name_of(each.name, each.tokens) if len(each.tokens) == size else b""
            )
            for each in (pages.blocks[place] for place in fits)
        }
        self._layers[layer] = known.holding({**known.blocks, **held})

    def whole(self, given: Sequence[tuple[int, int]]) -> bool:
        """Whether all that was given to this stage has come."""
        return self._messages >= sum(count for stage, count in given if stage == self._role.stage)

    def joined(self) -> Inheritance:
        """What the stage holds now."""
        held = self._kept
        for layer, each in sorted(self._layers.items()):
            if layer not in self._refused:
                held = held.joined(each)
        return held


class Mover:
    """The handover of one stage: gives when it is asked, gets, and keeps the survey back until all is there. Lives in the worker's thread."""

    def __init__(self, executor: StageExecutor, epoch: int, leaving: Leaving, kept: Inheritance) -> None:
        self._executor, self._epoch, self._leaving = executor, epoch, leaving
        self._arriving = Arriving(executor.role, executor.pools, kept)
        self._survey: Survey | None = None

    def give(self) -> Iterator[tuple[Side, KvPages, list[torch.Tensor]]]:
        return self._leaving.messages(self._executor.role, self._epoch)

    def take(self, pages: KvPages, bodies: Sequence[memoryview]) -> None:
        """Raises StepError behind the first step."""
        if self._executor.stepped:
            raise StepError(f"pages of layer {pages.layer} came behind the first step")
        self._arriving.take(pages, bodies)

    def asked(self, survey: Survey) -> None:
        self._survey = survey

    def answer(self) -> Survey | None:
        """To the survey that waits, once all is there."""
        survey = self._survey
        if survey is None or not self._arriving.whole(survey.given):
            return None
        self._survey = None
        self._executor.inherit(self._arriving.joined())
        return self._executor.survey(survey)


def with_given(handover: Handover, role: Role, counts: Mapping[Side, int]) -> list[tuple[int, int]]:
    """Messages to each stage, with those of this one."""
    places = {"before": (role.stage - 1) % role.stages, "behind": (role.stage + 1) % role.stages}
    return [*handover.given, *((places[side], count) for side, count in counts.items() if count)]


def _paged(pool: LayerPool) -> list[torch.Tensor]:
    """What it stores as [2, kv_heads, pages, page_tokens, ...]."""
    return [
        tensor.view(*tensor.shape[:2], pool.shape.pages, pool.shape.page_tokens, *tensor.shape[3:])
        for tensor in pool.storage
    ]


def _page_bytes(paged: torch.Tensor) -> int:
    return paged.nbytes // paged.shape[2]
