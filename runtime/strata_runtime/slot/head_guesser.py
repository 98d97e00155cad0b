"""An EAGLE-3 head beside the stage whose hidden states it reads: keeps these by the replica's blocks, and drafts from them. Loaded by the slot's prepare.

States of all positions lie in a pool under the blocks' numbers, as keys and values do: so nothing needs to know which step computed them, for whom, or what
was refused since. Whatever a table says of a text holds for them too. Source: EAGLE-3 (arXiv 2503.01840), section 3.1.
"""

import logging
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from strata_runtime.errors import RuntimeFaultError
from strata_runtime.model.eagle_head import FIRST, EagleHead
from strata_runtime.model.kv import Batch
from strata_runtime.slot.drafter import Guesser

log = logging.getLogger(__name__)


class HeadGuesser(Guesser):
    """`places`: of the replica's pool, page after page."""

    first = FIRST

    def __init__(self, head: EagleHead, places: int) -> None:
        self.head = head
        size = (places, head.shape.hidden_size)
        self.states = torch.empty(size, dtype=head.dtype, device=head.device).zero_()  # taken and touched now
        self._own = self.states[:0]  # of the rows that were sampled last
        self._are_missing = False  # states of some step

    def begin(self) -> None:
        self._are_missing = False

    def take(self, states: list[Tensor], batch: Batch) -> None:
        """Hidden states [tokens, target's hidden] that layers hand on in a step of the model that verifies, which goes on where this fails."""
        try:
            self.states.index_copy_(0, batch.places, self.head.fuse(states))
        except Exception:
            log.exception("hidden states of a step are not kept")
            self._are_missing = True

    def logits(self, tokens: Tensor, batch: Batch) -> Tensor:
        """Raises RuntimeFaultError where states are missing."""
        if self._are_missing:
            raise RuntimeFaultError("hidden states of a step could not be kept")
        return self._run(tokens, self.states[_places_before(batch)], batch)

    def further(self, tokens: Tensor, batch: Batch, rows: Sequence[int]) -> Tensor:
        return self._run(tokens, self._own[list(rows)], batch)

    def tokens(self, chosen: list[int]) -> list[int]:
        tokens: list[int] = self.head.targets[chosen].tolist()
        return tokens

    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        return self.head.kernel_sizes(batch)

    def _run(self, tokens: Tensor, before: Tensor, batch: Batch) -> Tensor:
        logits, self._own = self.head.forward(tokens, before, batch)
        return logits


def _places_before(batch: Batch) -> Tensor:
    """[tokens]: of the position before each token's, in its own sequence."""
    size = batch.page_tokens
    positions = ((span.pages, range(span.start - 1, span.end - 1)) for span in batch.spans)
    places = ([pages[each // size] * size + each % size for each in covered] for pages, covered in positions)
    return torch.tensor([*chain.from_iterable(places)], dtype=torch.int64, device=batch.positions.device)
