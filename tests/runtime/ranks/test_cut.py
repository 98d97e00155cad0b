"""Which part of a model each rank holds: everything is held, heads go with the keys that they attend to, shares are as even as whole things go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.shares import TILE, Shares
from strata_planner.costs.shards import Portion, portion_of
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape
from strata_runtime.errors import InputError
from strata_runtime.ranks.cut import Cut, Heads, LinearCut, share

SHARES = st.integers(1, 9)
HEADS = st.tuples(st.integers(1, 12), st.integers(1, 8)).map(lambda pair: Heads(pair[0] * pair[1], pair[0], 16))


def cuts(heads: Heads, ranks: int, shares: Shares = ()) -> list[Cut]:
    return [Cut(rank, ranks, heads, shares) for rank in range(ranks)]


def drawn(data: st.DataObject, most: int) -> tuple[int, Shares]:
    """So many ranks at most, with shares or without."""
    ranks = data.draw(st.integers(1, most))
    return ranks, data.draw(st.just(()) | st.tuples(*[SHARES] * ranks))


@given(heads=HEADS, data=st.data())
def test_every_query_is_held_once_beside_its_key(heads: Heads, data: st.DataObject) -> None:
    ranks, shares = drawn(data, heads.queries)
    group = heads.queries // heads.keys
    held = []
    for cut in cuts(heads, ranks, shares):
        queries = range(*cut.queries)
        assert queries, "a rank without heads"
        assert {query // group for query in queries} == set(range(*cut.keys))
        assert len(queries) % len(range(*cut.keys)) == 0, (
            "queries are shared out evenly among keys, as attention takes them"
        )
        held += queries
    assert held == list(range(heads.queries))


@given(heads=HEADS, data=st.data())
def test_no_rank_has_over_one_key_more_than_another(heads: Heads, data: st.DataObject) -> None:
    counts = [len(range(*cut.keys)) for cut in cuts(heads, data.draw(st.integers(1, heads.queries)))]
    assert max(counts) - min(counts) <= 1


@given(width=st.integers(8, 30_000), data=st.data())
def test_columns_of_an_mlp_are_dealt_in_tiles(width: int, data: st.DataObject) -> None:
    ranks, shares = drawn(data, 8)
    held = [cut.columns(width) for cut in cuts(Heads(8, 8, 16), ranks, shares)]
    assert [first for first, _ in held] == [0, *(last for _, last in held[:-1])]
    assert held[-1][1] == width
    assert all(last > first for first, last in held)
    if width >= TILE * ranks:
        assert all(first % TILE == 0 for first, _ in held)


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", (512, 256), LinearCut(rows=((192, 384),))),
        ("model.layers.0.self_attn.v_proj", (128, 256), LinearCut(rows=((48, 96),))),
        ("model.layers.0.self_attn.o_proj", (256, 512), LinearCut(columns=(192, 384))),
        ("model.layers.0.mlp.up_proj", (640, 256), LinearCut(rows=((256, 448),))),
        ("model.layers.0.mlp.down_proj", (256, 640), LinearCut(columns=(256, 448))),
    ],
)
def test_eight_key_heads_over_three_ranks(key: str, shape: tuple[int, int], expected: LinearCut) -> None:
    assert Cut(1, 3, Heads(32, 8, 16)).linear(key, shape) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("q_a_proj", (48, 256), LinearCut()),
        ("kv_a_proj_with_mqa", (72, 256), LinearCut()),
        ("q_b_proj", (8 * 24, 48), LinearCut(rows=((72, 144),))),
        ("q_proj", (8 * 24, 256), LinearCut(rows=((72, 144),))),
        ("kv_b_proj", (8 * 20, 64), LinearCut(rows=((60, 120),))),
        ("o_proj", (256, 8 * 10), LinearCut(columns=(30, 60))),
    ],
)
def test_eight_heads_of_latent_keys_over_three_ranks(name: str, shape: tuple[int, int], expected: LinearCut) -> None:
    """All hold the latents, which are wider than anything of a head."""
    cut = Cut(1, 3, Heads(8, 1, 72))
    assert cut.linear(f"model.layers.0.self_attn.{name}", shape) == expected
    assert (cut.keys, cut.queries) == ((0, 1), (3, 6))


def test_eight_over_three_is_three_three_two() -> None:
    assert [share(8, 3, place) for place in range(3)] == [(0, 3), (3, 6), (6, 8)]


@given(heads=HEADS, width=st.integers(64, 4096), data=st.data())
def test_the_planner_counts_what_ranks_hold(heads: Heads, width: int, data: st.DataObject) -> None:
    """Of unlike shares to the last column; of equal ones it counts the largest for all."""
    ranks = data.draw(st.integers(2, min(8, heads.queries)) if heads.queries > 1 else st.nothing())
    shares = data.draw(st.tuples(*[SHARES] * ranks).filter(lambda each: len(set(each)) > 1))
    hidden = heads.queries * heads.width
    sizes = {
        "q_proj": (hidden, hidden),
        "k_proj": (heads.keys * heads.width, hidden),
        "o_proj": (hidden, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    linears = tuple(Linear(name, *shape) for name, shape in sizes.items())
    layer = LayerShape(heads.queries, heads.keys, heads.width, linears, 0)
    for cut in cuts(heads, ranks, shares):
        part = portion_of(layer, Portion(shares, cut.rank))
        assert (part.heads, part.kv_heads) == tuple(last - first for first, last in (cut.queries, cut.keys))
        for linear in part.linears:
            own = cut.linear(f"model.layers.0.x.{linear.name}", sizes[linear.name]).shape(sizes[linear.name])
            assert (linear.out_features, linear.in_features) == own


@pytest.mark.parametrize(
    ("shares", "keys", "columns"),
    [
        ((5, 3), [(0, 5), (5, 8)], [(0, 640), (640, 1024)]),
        ((2, 1), [(0, 5), (5, 8)], [(0, 704), (704, 1024)]),
        ((1, 9), [(0, 1), (1, 8)], [(0, 128), (128, 1024)]),
        ((1, 1), [(0, 4), (4, 8)], [(0, 512), (512, 1024)]),
    ],
)
def test_unlike_shares_of_eight_key_heads(
    shares: Shares, keys: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> None:
    held = cuts(Heads(32, 8, 16), 2, shares)
    assert [cut.keys for cut in held] == keys
    assert [cut.columns(1024) for cut in held] == columns


@pytest.mark.parametrize(("shares", "said"), [((1, 2, 3), "1:2:3 of 2 devices"), ((0, 2), "shares 0:2: each")])
def test_shares_that_are_none_are_refused(shares: Shares, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.*plan again"):
        Cut(0, 2, Heads(8, 4, 16), shares)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(InputError, match="5 ranks cannot share 4 heads"):
        Cut(0, 5, Heads(4, 2, 8))


def test_a_linear_of_which_nothing_is_known_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'model\.layers\.0\.conv\.in_proj'"):
        Cut(0, 2, Heads(4, 2, 8)).linear("model.layers.0.conv.in_proj", (96, 32))


IN_ONE = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@given(heads=HEADS, data=st.data())
def test_a_weight_that_is_several_in_one_is_cut_as_each_of_them(heads: Heads, data: st.DataObject) -> None:
    """Whether its parts lie one after the other or by key heads: of each value it is told where it comes from, and ranks keep what they would alone."""
    (ranks, shares), width = drawn(data, heads.queries), data.draw(st.integers(8, 300))
    rows = {"q_proj": heads.queries * 16, "gate_proj": width, "up_proj": width} | dict.fromkeys(
        ("k_proj", "v_proj"), heads.keys * 16
    )
    for cut in cuts(heads, ranks, shares):
        alone = {name: taken([(name, row) for row in range(count)], cut, name) for name, count in rows.items()}
        for name, parts in IN_ONE.items():
            both = [(part, row) for part in parts for row in range(rows[part])]
            assert taken(both, cut, name) == [value for part in parts for value in alone[part]]
        group = heads.queries // heads.keys
        by_heads = [
            (name, head * count * 16 + row)
            for head in range(heads.keys)
            for name, count in (("q_proj", group), ("k_proj", 1), ("v_proj", 1))
            for row in range(count * 16)
        ]
        kept = taken(by_heads, cut, "query_key_value")
        for name in IN_ONE["qkv_proj"]:
            assert [value for value in kept if value[0] == name] == alone[name]
        assert len(kept) == sum(len(alone[name]) for name in IN_ONE["qkv_proj"])


def taken(rows: list[tuple[str, int]], cut: Cut, name: str) -> list[tuple[str, int]]:
    """What of the rows of a linear of that name a rank holds, in order."""
    ranges = cut.linear(f"model.layers.0.x.{name}", (len(rows), 64)).rows
    assert ranges is not None
    return [row for first, last in ranges for row in rows[first:last]]
