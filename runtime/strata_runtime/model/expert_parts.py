"""Which part of a layer's fused experts a checkpoint tensor is, and where the fused parameters are.

Used by `ModelSlice`. transformers fuses the experts of a layer into parameters of three dimensions, [experts, N, K]; checkpoints hold them so,
or each expert for itself, its gate apart from its up.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_EXPERTS_FIRST = 3  # dimensions of a fused parameter
_ANY_EXPERT = "*"


@dataclass(frozen=True)
class ExpertPart:
    """`key`: path of the fused parameter; `expert` None: the tensor is the whole parameter; `part`: which of an expert's matrices that lie
    one below the other (gate 0, up 1).
    """

    key: str
    expert: int | None = None
    part: int = 0


def expert_part(checkpoint_key: str, parameter: str, pattern: str | None, converters: Iterable[Any]) -> ExpertPart:
    """Of a tensor that fills the fused `parameter`. `pattern`: of one of transformers' converters, by which it was renamed; None: it is not merged."""
    if pattern is None:
        return ExpertPart(parameter)
    sources = next(each.source_patterns for each in converters if pattern in each.source_patterns)
    number = re.search(re.escape(pattern).replace(re.escape(_ANY_EXPERT), r"(\d+)"), checkpoint_key)
    assert number is not None, checkpoint_key  # the pattern is where the name came from
    return ExpertPart(parameter, int(number.group(1)), sources.index(pattern))


def fused_parameters(layer: nn.Module, path: str) -> dict[str, tuple[nn.Module, str]]:
    """Path of each fused parameter of a layer at `path` -> the module and attribute that hold it."""
    return {
        f"{path}.{within}.{name}": (module, name)
        for within, module in layer.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == _EXPERTS_FIRST and not isinstance(module, nn.Conv1d)
    }
