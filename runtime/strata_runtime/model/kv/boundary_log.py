"""What a stage has handed on, kept in host memory by place: the inputs of the layer behind its last one, so that lost layers are computed again from there.

Part of PagedKvCache, under the same numbers of pages, of which it may have fewer; written by the stage executor with every step. 2 bytes x hidden x tokens
at 16 bits.
"""

import torch
from torch import Tensor


class BoundaryLog:
    """rows: [pages * page_tokens, hidden] in the compute type, on the host, taken and touched at construction."""

    def __init__(self, pages: int, page_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.pages = pages
        self.rows = torch.empty((pages * page_tokens, hidden), dtype=dtype).zero_()

    @property
    def bytes(self) -> int:
        return self.rows.nbytes

    def write(self, places: Tensor, hidden: Tensor) -> None:
        """places: [tokens]; hidden: [tokens, hidden], any device. Those behind its last page are not kept."""
        places, hidden = places.cpu(), hidden.cpu()
        if len(places) and int(places.max()) >= len(self.rows):
            inside = places < len(self.rows)
            places, hidden = places[inside], hidden[inside]
        self.rows.index_copy_(0, places, hidden)

    def read(self, places: Tensor) -> Tensor:
        """places: [tokens] -> [tokens, hidden] on the host."""
        return self.rows.index_select(0, places.cpu())

    def take(self, held: "BoundaryLog") -> None:
        """The rows of a log that is not written any more, in the pages that both have; they are inputs of its layer still."""
        if held.rows.shape == self.rows.shape:
            self.rows = held.rows
            return
        places = min(len(held.rows), len(self.rows))
        self.rows[:places].copy_(held.rows[:places])
