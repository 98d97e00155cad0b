"""Which part of each linear a rank holds: Megatron's cut of a layer (arXiv 1909.08053, section 3), for any number of ranks.

Queries, keys, values and the MLP's first half by outputs, the attention's output and the MLP's second half by inputs, embedding and head by
vocabulary. Heads go whole, with the keys and values that they attend to: where key heads do not divide, ranks hold one more or less (8 over 3: 3, 3, 2);
where ranks outnumber them, several ranks hold the same key head and share out its queries (HexGen, arXiv 2311.11514, needs no even cut either). The
MLP's columns are dealt in tiles. A weight that is several in one (queries, keys and values; gate and up) is cut as each of them is, whichever way
they lie in it. How much each rank has follows its share (`contract.shares`), which the planner counts by too. Pure arithmetic: knows no tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strata_planner.contract import shares as dealing
from strata_planner.contract.architectures import ROUTING
from strata_planner.contract.shares import Shares
from strata_runtime.errors import InputError
from strata_runtime.ranges import Range, Ranges

# By the last name in a linear's path, or the last two.
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("q_proj", "q_b_proj", "kv_b_proj"), "queries"
    ),  # of latent keys and values each query head makes its own
    **dict.fromkeys(("k_proj", "v_proj"), "keys"),
    **dict.fromkeys(("qkv_proj", "c_attn"), "one after the other"),  # all queries, all keys, all values
    "query_key_value": "by key heads",  # each with its queries before it and its value behind it
    **dict.fromkeys(("o_proj", "out_proj", "dense", "attn.c_proj"), "attended"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "c_fc", "w1", "w3", "dense_h_to_4h"), "wide"),
    "gate_up_proj": "two wide",
    **dict.fromkeys(("down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h"), "narrow"),
    **dict.fromkeys(
        (*ROUTING, "q_a_proj", "kv_a_proj_with_mqa"), "whole"
    ),  # what routes, and what all heads are made of
}
OF_ATTENTION = frozenset({"queries", "keys", "one after the other", "by key heads", "attended"})
BY_INPUTS = frozenset({"attended", "narrow"})


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a model's attention: query heads, key heads, width of what is kept of one."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True)
class LinearCut:
    """What of a linear's weight [N, K] a rank holds; None: all. Where inputs are cut, what ranks compute is added up."""

    rows: Ranges | None = None
    columns: Range | None = None

    def shape(self, whole: tuple[int, int]) -> tuple[int, int]:
        """Of the part of a weight of this shape."""
        first, last = self.columns or (0, whole[1])
        return whole[0] if self.rows is None else length(self.rows), last - first


WHOLE = LinearCut()


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of rank `rank` of `ranks`; `shares`: of each, none: equal ones. Raises InputError for more ranks than heads, and for shares that are none."""

    rank: int
    ranks: int
    heads: Heads
    shares: Shares = ()

    def __post_init__(self) -> None:
        if self.ranks > self.heads.queries:
            raise InputError(
                f"{self.ranks} ranks cannot share {self.heads.queries} heads: each needs one; use fewer ranks"
            )
        if problem := dealing.problem_of(self.shares, self.ranks):
            raise InputError(f"{problem}; plan again")

    @property
    def of_each(self) -> Shares:
        return dealing.of_ranks(self.shares, self.ranks)

    @property
    def keys(self) -> Range:
        """The key heads."""
        return dealing.key_heads(self.heads.keys, self.of_each, self.rank)

    @property
    def queries(self) -> Range:
        """The query heads: all those of its key heads, or its share of those of the one that it shares."""
        return dealing.query_heads(self.heads.queries, self.heads.keys, self.of_each, self.rank)

    def columns(self, width: int) -> Range:
        """Of the `width` columns between the two halves of an MLP: whole tiles, where there are enough for all."""
        return dealing.columns(width, self.of_each, self.rank)

    def of(self, count: int) -> Range:
        """Of whole things, such as experts."""
        return dealing.part(count, self.of_each, self.rank)

    def linear(self, key: str, shape: tuple[int, int]) -> LinearCut:
        """What of the linear at this path of the model; shape: [N, K]. Raises InputError for one that is not known."""
        kind = kind_of(key)
        if not kind:
            raise InputError(
                f"how '{key}' is cut over several devices is not known: give this model stages of one device each"
            )
        if kind == "whole":
            return WHOLE
        if kind in BY_INPUTS:
            columns = self._of_queries(shape[1]) if kind == "attended" else self.columns(shape[1])
            return LinearCut(columns=columns)
        return LinearCut(rows=self._rows(kind, shape[0]))

    def _rows(self, kind: str, count: int) -> Ranges:
        """Of the `count` outputs of a linear of this kind."""
        queries, keys, half = self._wide(self.queries), self._wide(self.keys), count // 2
        all_queries, all_keys = self.heads.queries * self.heads.width, self.heads.keys * self.heads.width
        match kind:
            case "queries":
                return (self._of_queries(count),)
            case "keys":
                return (keys,)
            case "one after the other":
                return joined((queries, moved(keys, all_queries), moved(keys, all_queries + all_keys)))
            case "by key heads":
                return self._by_key_heads()
            case "wide":
                return (self.columns(count),)
        assert kind == "two wide", kind
        return joined((self.columns(half), moved(self.columns(half), half)))

    @property
    def counts_keys(self) -> bool:
        """Whether what is added up over all key heads has those of this rank from this rank, and from no other that holds them too."""
        keys = self.heads.keys
        return self.ranks <= keys or dealing.sharers(keys, self.ranks, self.rank)[1] == self.rank

    def _by_key_heads(self) -> Ranges:
        """Rows of a weight that has, for each key head, its queries, its key and its value."""
        group = self.heads.queries // self.heads.keys
        ranges: list[Range] = []
        for head in range(*self.keys):
            start = head * (group + 2)
            first, last = (min(max(each - head * group, 0), group) for each in self.queries)
            ranges += [(start + first, start + last), (start + group, start + group + 2)]
        return joined(self._wide(each) for each in ranges)

    def _of_queries(self, count: int) -> Range:
        """Of so many values in a row, as many of each query head: keys may be wider or narrower, as may what is attended."""
        width = count // self.heads.queries
        return self.queries[0] * width, self.queries[1] * width

    def _wide(self, heads: Range) -> Range:
        return heads[0] * self.heads.width, heads[1] * self.heads.width


def kind_of(key: str) -> str:
    """What a linear is to the cut, by its path; empty: unknown."""
    names = key.rsplit(".", 2)
    return _KINDS.get(".".join(names[-2:])) or _KINDS.get(names[-1], "")


def moved(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by


def length(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)


def joined(ranges: Iterable[Range]) -> Ranges:
    """The same with those in one that touch, and none that is empty."""
    found: list[Range] = []
    for first, last in ranges:
        if first == last:
            continue
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def share(count: int, parts: int, place: int) -> Range:
    """The part at `place` of `count` things in a row that are dealt to `parts`, as evenly as whole things go; the first ones get more."""
    least, more = divmod(count, parts)
    begin = place * least + min(place, more)
    return begin, begin + least + (place < more)
