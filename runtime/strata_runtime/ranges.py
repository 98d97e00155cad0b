"""Which rows and columns of a matrix are meant, where ranks share it, and the rows that lie there. Used by cuts, formats and loading."""

from collections.abc import Sequence

import torch
from torch import Tensor

Range = tuple[int, int]  # first, behind the last
Ranges = tuple[Range, ...]  # in order, without overlap


def rows_in(tensor: Tensor, rows: Ranges | None) -> Tensor:
    """Of [N, ...]; None: all. A view, where they lie together."""
    return tensor if rows is None else below([tensor[slice(*each)] for each in rows])


def below(parts: Sequence[Tensor]) -> Tensor:
    """Rows one below the other; of one part no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
