"""Which part of a layer with state a rank holds: heads of a linear attention with their channels and matrices, or channels of a short convolution.

Value heads go as query heads do (`ranks.cut`), with the key heads that they belong to: where ranks outnumber those, several hold one and share out its value heads.
Channels of a convolution are each for itself. How much each rank has follows its share, by the arithmetic that the planner counts with
(`contract.sequence_state`). Pure arithmetic: knows no tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from strata_planner.contract import shares as dealing
from strata_planner.contract.sequence_state import SequenceState
from strata_planner.contract.shares import Shares
from strata_runtime.errors import InputError
from strata_runtime.ranges import Range, Ranges
from strata_runtime.ranks.cut import LinearCut, joined, moved

_Kind = Literal["key", "value", "decay"]  # of each key head `key_dim`, of each value head `value_dim`, or one, values
# What lies in a parameter, by the last name in its path: all heads of the first kind, then those of the next one; or this for each key head.
_IN_TURN: Mapping[str, tuple[_Kind, ...]] = {
    **dict.fromkeys(("in_proj_qkv", "conv1d.weight"), ("key", "key", "value")),
    "in_proj_z": ("value",),
    **dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"), ("decay",)),
}
_BY_KEY_HEADS: Mapping[str, tuple[_Kind, ...]] = {
    "in_proj_qkvz": ("key", "key", "value", "value"),
    "in_proj_ba.weight": ("decay", "decay"),
}
# Of a short convolution: so many times all channels.
_OF_CHANNELS = {"in_proj": 3, "conv.weight": 1, "conv.bias": 1}
_BY_INPUTS = "out_proj"


@dataclass(frozen=True, slots=True)
class StateCut:
    """Of rank `rank` of those with these shares, of layers with the state `whole`. Raises InputError for more ranks than there are heads, or channels."""

    whole: SequenceState
    shares: Shares
    rank: int

    def __post_init__(self) -> None:
        heads = self.whole.heads
        count, what = (heads, "heads of linear attention") if heads else (self.whole.channels, "channels")
        if len(self.shares) > count:
            raise InputError(f"{len(self.shares)} ranks cannot share {count} {what}: each needs one; use fewer ranks")

    @property
    def own(self) -> SequenceState:
        """What a sequence keeps on this rank."""
        return self.whole.part(self.shares, self.rank)

    @property
    def keys(self) -> Range:
        """The key heads."""
        return dealing.key_heads(self.whole.key_heads, self.shares, self.rank)

    @property
    def values(self) -> Range:
        """The value heads."""
        return dealing.query_heads(self.whole.heads, self.whole.key_heads, self.shares, self.rank)

    def linear(self, name: str) -> LinearCut:
        """What of a projection, by its name in the layer. Raises InputError for one that is not known."""
        if name == _BY_INPUTS:
            return LinearCut(columns=self._of("value") if self.whole.heads else self._channels)
        rows = self.rows(name)
        if not rows:
            raise InputError(
                f"how '{name}' of a layer with state is cut over several devices is not known: give this model stages of one device each"
            )
        return LinearCut(rows=rows)

    def rows(self, name: str) -> Ranges:
        """Of a parameter, or a projection that is cut by outputs, by its name in the layer; none: nothing is known of one with that name."""
        if not self.whole.heads:
            all_channels = range(_OF_CHANNELS.get(name, 0))
            return joined(moved(self._channels, each * self.whole.channels) for each in all_channels)
        if name in _BY_KEY_HEADS:
            return joined(self._by_key_heads(_BY_KEY_HEADS[name]))
        return joined(self._in_turn(_IN_TURN.get(name, ())))

    @property
    def _channels(self) -> Range:
        return dealing.columns(self.whole.channels, self.shares, self.rank)

    def _in_turn(self, kinds: Iterable[_Kind]) -> Iterable[Range]:
        start = 0
        for kind in kinds:
            yield moved(self._of(kind), start)
            start += self._size(kind)

    def _by_key_heads(self, kinds: tuple[_Kind, ...]) -> Iterable[Range]:
        heads = self.whole.key_heads
        start = self.keys[0] * sum(self._size(kind) for kind in kinds) // heads
        for head in range(*self.keys):
            for kind in kinds:
                size = self._size(kind) // heads  # of one key head
                first, last = (min(max(each - head * size, 0), size) for each in self._of(kind))
                yield start + first, start + last
                start += size

    def _of(self, kind: _Kind) -> Range:
        """Of all values of a kind those of this rank's heads."""
        heads, width = (self.keys if kind == "key" else self.values), self._width(kind)
        return heads[0] * width, heads[1] * width

    def _size(self, kind: _Kind) -> int:
        return self._width(kind) * (self.whole.key_heads if kind == "key" else self.whole.heads)

    def _width(self, kind: _Kind) -> int:
        """Of one head."""
        return {"key": self.whole.key_dim, "value": self.whole.value_dim, "decay": 1}[kind]
