"""An EAGLE-3 head beside the leader: keeps the model's hidden states by the replica's blocks, and drafts from them. Loaded by the slot's prepare.

States of all positions lie in a pool under the blocks' numbers, as keys and values do: so nothing needs to know which step computed them, for whom, or what
was refused since. Whatever a table says of a text holds for them too. A step's states come with its result, in the order of steps, from this stage or
from the last one: a block that was given to another text meanwhile is written over by that text's later step, and nobody drafts before the results of
all that its text was computed in. Source: EAGLE-3 (arXiv 2503.01840), section 3.1.
"""

import logging
from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from strata_runtime.allocator import FirstTimes
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.model.eagle_head import FIRST, EagleHead
from strata_runtime.model.kv import Batch
from strata_runtime.slot.drafter import Guesser

log = logging.getLogger(__name__)


class HeadGuesser(Guesser):
    """`places`: of the replica's pool, page after page. `fused`: the layers whose states the head fuses, in its own order."""

    first = FIRST

    def __init__(self, head: EagleHead, places: int, fused: Sequence[int]) -> None:
        self.head = head
        self._order = [sorted(set(fused)).index(layer) for layer in fused]  # of what steps bring
        self._first_times = FirstTimes()
        self._expected: deque[Tensor] = deque()  # places of steps whose states have not come
        size = (places, head.shape.hidden_size)
        self.states = torch.empty(size, dtype=head.dtype, device=head.device).zero_()  # taken and touched now
        self._own = self.states[:0]  # of the rows that were sampled last
        self._are_missing = False  # states of some step

    def begin(self) -> None:
        self._are_missing = False
        self._expected.clear()

    def expect(self, places: Tensor) -> None:
        self._expected.append(places)

    def take(self, states: Sequence[Tensor]) -> None:
        """Steps go on where this fails."""
        try:
            places = self._expected.popleft()
            with self._first_times.step(self.head.fuse_sizes(len(places))), torch.inference_mode():
                self.states.index_copy_(0, places, self.head.fuse([states[each] for each in self._order]))
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
