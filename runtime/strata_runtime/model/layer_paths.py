"""Where a tensor or a linear belongs, from its path: `model.layers.0.mlp.down_proj`, in GPT-2 `transformer.h.0.mlp.c_proj`.

Used by whoever sorts keys of a checkpoint or a model by layer.
"""

import re

LAYER_LISTS = ("layers", "h")  # what models call their decoder layers
LISTED = f"(?:{'|'.join(LAYER_LISTS)})"
_LAYER = re.compile(rf"(?P<before>^|.*?\.)(?P<list>{LISTED})\.(?P<layer>\d+)\.(?P<within>.*)")


def layer_of(path: str) -> int | None:
    """None: it belongs to no layer."""
    found = _LAYER.fullmatch(path)
    return int(found["layer"]) if found else None


def within_layer(path: str) -> str:
    """The rest of the path; empty for what belongs to no layer."""
    found = _LAYER.fullmatch(path)
    return found["within"] if found else ""


def in_layer(path: str, layer: int) -> str:
    """The same place in another layer."""
    return _LAYER.sub(rf"\g<before>\g<list>.{layer}.\g<within>", path, count=1)
