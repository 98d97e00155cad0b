"""The weights that a slot's process holds, part by part: decoder layers, and what lies outside of them.

Made by a prepare of what the roles before hold. `load_stage` takes from it whatever the next role has too, and puts into it what it has stored, so that a load that
is ended half-way leaves its whole layers to the next. Stages refer to tensors and share them: what no stage and no store refers to is freed. Knows no roles' numbers,
no epochs and no files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from strata_planner.contract.formats import BITS_OF_FORMAT, ComputeType, FormatName
from strata_planner.contract.roles import Role
from strata_runtime.formats.draft_linear import DraftLinear
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.linear_source import ANY_FORMATS, LinearSource


@dataclass(frozen=True, slots=True)
class Origin:
    """What weights are of: only those of one origin stand for each other. `digest`: of the checkpoint as its files were (`model_digest_here`)."""

    model_uri: str
    digest: str
    compute_type: ComputeType
    device: str

    def serves(self, role: Role) -> bool:
        """Whether it may be the role's, as far as can be told without reading."""
        return (self.model_uri, self.compute_type) == (role.model_uri, role.compute_type)


@dataclass(slots=True, eq=False)
class HeldLayer:
    """A decoder layer as a stage holds it. `format` is that which it has now: whoever changes its bits says so."""

    origin: Origin
    number: int  # in the whole model
    format: FormatName
    source: LinearSource
    module: nn.Module

    @property
    def copy(self) -> str | None:
        """The checksum of its file in the any-precision copy that its planes are of; None: they were made here and not kept."""
        return self.source.checksum(self.number)

    @property
    def draft_bits(self) -> int:
        """Of what its linears draft with; 0 where they draft with themselves."""
        drafts = (each.draft.bits for each in self.module.modules() if isinstance(each, DraftLinear))
        return next(drafts, 0)

    def becomes(self, name: FormatName) -> bool:
        """Whether a layer in that format is made of it: as it is, or with the planes that both have."""
        return self.format == name or {self.format, name} <= ANY_FORMATS

    def kept_bytes(self, name: FormatName) -> int:
        """Of its tensors those that a layer in that format has too."""
        return kept_bytes([self.module], None if name == self.format else BITS_OF_FORMAT[name])


@dataclass(frozen=True, slots=True)
class Outside:
    """What of a model outside its layers a stage has."""

    embedding: bool
    head: bool
    head_format: FormatName

    @staticmethod
    def of(role: Role) -> "Outside":
        return Outside(role.embedding, role.head, role.head_format)


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutside:
    """Embedding, last norm and head of a stage, as far as it has them. `modules`: by path."""

    origin: Origin
    has: Outside
    modules: Mapping[str, nn.Module]

    def kept_bytes(self, wanted: Outside) -> int:
        """Those of a stage that wants as much or more."""
        return kept_bytes(self.modules.values(), None) if wanted == self.has else 0


class LayerStore:
    """What may be taken. Not for two threads at once."""

    def __init__(self) -> None:
        self._layers: list[HeldLayer] = []
        self._outside: list[HeldOutside] = []

    def __len__(self) -> int:
        return len(self._layers) + len(self._outside)

    def put(self, *parts: HeldLayer | HeldOutside) -> None:
        for part in parts:
            if isinstance(part, HeldLayer):
                if not any(each.module is part.module for each in self._layers):
                    self._layers.append(part)
            elif not any(each is part for each in self._outside):
                self._outside.append(part)

    def layer(self, origin: Origin, number: int, name: FormatName) -> HeldLayer | None:
        """What the layer in that format is best made of: one of that format, else one with planes, the most of them."""
        found = [each for each in self._layers if (each.origin, each.number) == (origin, number) and each.becomes(name)]
        return max(found, key=lambda each: (each.format == name, BITS_OF_FORMAT[each.format]), default=None)

    def outside(self, origin: Origin, wanted: Outside) -> HeldOutside | None:
        """Of that origin: one of just what is wanted, else any."""
        found = [each for each in self._outside if each.origin == origin]
        return max(found, key=lambda each: each.has == wanted, default=None)

    def drop(self, part: HeldLayer | HeldOutside) -> None:
        """It is not to be taken any more: its memory ends with the stage that has it, if any."""
        self._layers = [each for each in self._layers if each is not part]
        self._outside = [each for each in self._outside if each is not part]

    def keep(self, roles: Iterable[Role]) -> None:
        """Let go of what none of these can have any use for."""
        wanted = tuple(roles)
        self._layers = [each for each in self._layers if any(_serves(each, role) for role in wanted)]
        self._outside = [
            each
            for each in self._outside
            if any(each.origin.serves(role) and (role.embedding or role.head) for role in wanted)
        ]

    def kept_bytes(self, role: Role) -> int:
        """Of what the role needs, the bytes that are held."""
        layers = range(role.layers[0], role.layers[1] + 1)
        total = 0
        for number, name in zip(layers, role.format, strict=True):
            fits = (each for each in self._layers if each.number == number and _serves(each, role))
            total += max((each.kept_bytes(name) for each in fits), default=0)
        outside = (each.kept_bytes(Outside.of(role)) for each in self._outside if each.origin.serves(role))
        return total + max(outside, default=0)

    def clear(self) -> None:
        self._layers.clear()
        self._outside.clear()

    def parts(self) -> tuple[HeldLayer | HeldOutside, ...]:
        return (*self._layers, *self._outside)


def _serves(held: HeldLayer, role: Role) -> bool:
    first, last = role.layers
    in_role = first <= held.number <= last and held.origin.serves(role)
    return in_role and held.becomes(role.format[held.number - first])


def kept_bytes(modules: Iterable[nn.Module], bits: int | None) -> int:
    """Of all tensors in modules, each counted once, those that stay where planes beyond the first `bits`, and their tables, go; None: none goes."""
    tensors: dict[int, int] = {}
    for module in (each for listed in modules for each in listed.modules()):
        if isinstance(module, BlockedLinear):
            tensors[id(module)] = module.nbytes
        elif isinstance(module, AnyLinear) and bits is not None:
            tensors |= _sizes(module.stored.planes[:bits])
        else:
            tensors |= _sizes((*module.parameters(recurse=False), *module.buffers(recurse=False)))
    return sum(tensors.values())


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
