"""What the pages of a stage hold that was formed anew, and which layers compute what they lack. Used by the stage executor and by whoever hands pages on.

Keys and values of a layer follow from the weights of all layers up to it: they are kept where these are the same, in every stage, and never else. Pure.
"""

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from strata_planner.contract.frames import Survey
from strata_planner.contract.roles import Role
from strata_runtime.loading.layer_store import HeldLayer
from strata_runtime.stage.contents import Content, both, in_common, told


def weights_by_layer(role: Role, held: Mapping[int, HeldLayer]) -> tuple[str, ...]:
    """What each layer computes keys and values with, and how these are kept: equal where both are. `held`: the layers as they were loaded."""
    found = []
    for number, bits, name in zip(range(role.layers[0], role.layers[1] + 1), role.bits, role.format, strict=True):
        layer = held.get(number)
        source = (layer.origin.digest, layer.copy) if layer else ()
        found.append(_digest(role.model_uri, repr((number, bits, name, role.kv_bits, role.compute_type, source))))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def weights_through(before: str, own: Sequence[str]) -> tuple[str, ...]:
    """The weights of all layers up to each of a stage's `own`; `before`: up to the stage."""
    found = []
    for each in own:
        before = _digest(before, each)
        found.append(before)
    return tuple(found)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Refill:
    """What one stage does in a step that computes some layers alone. `layers`: its own of them; `receives`, `sends`: hidden states, or token ids."""

    layers: range
    receives: bool
    reads_log: bool
    writes_log: bool
    sends: bool

    @classmethod
    def of(cls, refill: tuple[int, int] | None, role: Role) -> "Refill":
        """`refill`: first and end of the layers that compute, in the whole model."""
        assert refill is not None
        (first, end), begin, behind = refill, role.layers[0], role.layers[1] + 1
        layers = range(max(begin, first), max(begin, first, min(behind, end)))
        passed = first < behind <= end and len(layers) > 0
        return cls(
            layers=layers,
            receives=role.leader or first <= begin < end,
            reads_log=begin < first <= behind,
            writes_log=passed and not role.head,
            sends=first <= behind < end and not role.head,
        )


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What the pages of a stage hold of the epoch `formed` of the replica `before`: in its `blocks`, by the weights up to each layer that they are kept of
    (`through`). `boundary`: the layer whose inputs are kept, too, but for those of the blocks `unlogged`; 0: none's.
    """

    before: int = -1
    formed: int = 0
    through: Mapping[int, str] = field(default_factory=dict)
    boundary: int = 0
    blocks: Mapping[int, Content] = field(default_factory=dict)
    unlogged: frozenset[int] = frozenset()

    def of(self, layers: Collection[int], pages: int) -> "Inheritance":
        """The same of these layers alone, in so many pages."""
        through = {number: self.through[number] for number in layers if number in self.through}
        return replace(
            self, through=through, blocks={block: held for block, held in self.blocks.items() if block < pages}
        )

    def holding(self, blocks: Mapping[int, Content]) -> "Inheritance":
        return replace(self, blocks=blocks)

    def joined(self, other: "Inheritance") -> "Inheritance":
        """With layers that came from another stage: of the same epoch and replica, in blocks that hold the same. Else without them."""
        if not self.through:
            return other
        if (self.before, self.formed) != (other.before, other.formed):
            return self
        blocks = both(self.blocks, other.blocks)
        return replace(self, through={**other.through, **self.through}, blocks=blocks)

    def logged(self, pages: int) -> "Inheritance":
        """With what is kept in so many pages of a log."""
        return replace(self, unlogged=self.unlogged.union(block for block in self.blocks if block >= pages))

    def answer(self, survey: Survey, role: Role, through: Sequence[str], *, begins_anywhere: bool = True) -> Survey:
        """The survey with this stage worked in. `through`: the weights up to each layer of the role, now."""
        first, last = role.layers
        lacking = self.lacking(survey, first, through)
        begin, end = survey.lacking
        if lacking:
            begin, end = (min(begin, lacking[0]) if begin < end else lacking[0]), lacking[-1] + 1
        starts, unlogged = survey.starts, survey.unlogged
        if (
            first < self.boundary <= last + 1
            and (begins_anywhere or self.boundary == last + 1)
            and self.has_log_of(survey, self.boundary, through, first)
        ):
            starts, unlogged = (*starts, self.boundary), tuple(sorted(self.unlogged.union(unlogged)))
        answered = structs.replace(
            survey, weights=through[-1], layers=last + 1, lacking=(begin, end), starts=starts, unlogged=unlogged
        )
        if len(lacking) == len(through):
            return answered
        blocks = told(self.blocks) if survey.blocks is None else in_common(survey.blocks, self.blocks)
        return structs.replace(answered, formed=self.formed, before=self.before, blocks=blocks)

    def lacking(self, survey: Survey, first: int, through: Sequence[str]) -> list[int]:
        """Of the layers from `first` on those that do not hold what the survey speaks of, or what these weights would compute."""
        return [
            number for number, weights in enumerate(through, start=first) if not self._holds(survey, number, weights)
        ]

    def has_log_of(self, survey: Survey, boundary: int, through: Sequence[str], first: int) -> bool:
        """Whether the inputs of the layer `boundary` are kept, of weights as they are now. `first`: layer of the stage."""
        before = boundary - 1
        return (
            self.boundary == boundary
            and first <= before < first + len(through)
            and self._holds(survey, before, through[before - first])
        )

    def _holds(self, survey: Survey, number: int, weights: str) -> bool:
        same = survey.blocks is None or (self.before, self.formed) == (survey.before, survey.formed)
        return same and self.through.get(number) == weights
