"""Modules of another stage in one that is being made: modules of its own, of the very same tensors. Used by whoever makes a stage by difference.

Neither stage notices the other: what one changes later (bits, drafts, hooks) it changes in its own modules.
"""

from collections.abc import Mapping

from torch import nn

from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_runtime.formats.draft_linear import DraftLinear, target_of
from strata_runtime.formats.expert_stack import ExpertProjection
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.model.layer_paths import within_layer

Places = Mapping[str, tuple[nn.Module, str]]  # key of a linear -> what holds it, and as what


def adopt(own: nn.Module, held: nn.Module) -> None:
    """Give `own`, which has no weights yet, those of `held`: in linears of their formats, without what they draft with."""
    own._parameters.update(held._parameters)  # noqa: SLF001, the very same objects: tables that are tied stay so
    own._buffers.update(held._buffers)  # noqa: SLF001, of which a checkpoint may hold some
    for name, child in held._modules.items():  # noqa: SLF001, with those that are there twice
        if child is None:
            continue
        stored, mine = target_of(child), own._modules.get(name)  # noqa: SLF001
        if mine is not None and type(mine) is type(stored):
            adopt(mine, stored)
        else:
            own._parameters.pop(name, None)  # noqa: SLF001, fused experts that were quantized
            setattr(own, name, twin(stored))


def twin(module: nn.Module) -> nn.Module:
    """Another module of the same tensors."""
    other = type(module).__new__(type(module))
    children = {name: None if child is None else twin(child) for name, child in module._modules.items()}  # noqa: SLF001
    other.__dict__ = {
        **module.__dict__,
        "_parameters": dict(module._parameters),  # noqa: SLF001
        "_buffers": dict(module._buffers),  # noqa: SLF001
        "_modules": children,
    }
    return other


def has_planes_alone(layer: nn.Module) -> bool:
    """Whether other bits of a layer in an any-precision format are made of its planes: of quantized experts there is no copy."""
    return not any(isinstance(module, ExpertProjection) for module in layer.modules())


def move(places: Places, name: FormatName, source: LinearSource) -> None:
    """Linears of planes that have been adopted become those of another any-precision format: planes that both have stay, others are read.

    Raises InputError where `source` has no such planes or tables, or damaged ones.
    """
    bits = BITS_OF_FORMAT[name]
    for key, (parent, attribute) in places.items():
        linear = getattr(parent, attribute)
        if not isinstance(linear, AnyLinear):
            continue  # what a router decides with
        held = linear.stored
        device = held.table.device
        missing = source.missing_planes(key, linear.bits, bits) if bits > linear.bits else ()
        table = held.table if bits == linear.bits else source.table(key, bits).to(device)
        weight = linear.with_bits(bits, table, [plane.to(device) for plane in missing])
        setattr(parent, attribute, AnyLinear(weight, linear.bias, name))


def drafts_of(places: Places, held: nn.Module) -> dict[str, AnyLinear]:
    """What the linears of another stage's layer draft with, by their keys in `places`."""
    linears = {key: held.get_submodule(within_layer(key)) for key in places}
    return {key: linear.draft for key, linear in linears.items() if isinstance(linear, DraftLinear)}
