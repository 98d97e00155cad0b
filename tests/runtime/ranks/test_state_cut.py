"""Which part of a layer with state each rank holds: every value head once, beside its key head, in every parameter alike, and as the planner counts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.sequence_state import SequenceState
from strata_planner.contract.shares import Shares
from strata_planner.costs.shards import Portion, portion_of
from strata_planner.question.linear import Linear
from strata_planner.question.mixers import of_channels_and_heads, outputs_of
from strata_planner.question.model import LayerShape
from strata_runtime.errors import InputError
from strata_runtime.ranges import Ranges
from strata_runtime.ranks.cut import length
from strata_runtime.ranks.state_cut import StateCut

KEY, VALUE = 3, 2  # values of a head
Label = tuple[str, int, int]  # what, of which head, which of its values
HIDDEN = 64


def attention(keys: int, group: int) -> SequenceState:
    heads = keys * group
    return SequenceState(2 * keys * KEY + heads * VALUE, 3, heads, KEY, VALUE)


STATES = st.builds(attention, st.integers(1, 8), st.integers(1, 5))
CONVOLUTIONS = st.builds(SequenceState, st.integers(1, 3000), st.integers(1, 4))


def cuts(data: st.DataObject, state: SequenceState) -> list[StateCut]:
    ranks = data.draw(st.integers(1, min(8, state.heads or state.channels)))
    shares: Shares = data.draw(st.tuples(*[st.integers(1, 9)] * ranks))
    return [StateCut(state, shares, rank) for rank in range(ranks)]


def labelled(state: SequenceState) -> dict[str, list[Label]]:
    """What every row of each parameter is, as transformers lays them out."""
    group = state.heads // state.key_heads
    sizes = {"query": KEY, "key": KEY, "value": VALUE, "z": VALUE, "b": 1, "a": 1}

    def of(what: str, heads: range) -> list[Label]:
        return [(what, head, each) for head in heads for each in range(sizes[what])]

    keys, values = range(state.key_heads), range(state.heads)
    channels = of("query", keys) + of("key", keys) + of("value", values)

    def by_key_heads(*names: str) -> list[Label]:
        owned = {head: range(head * group, (head + 1) * group) for head in keys}
        return [
            each
            for head in keys
            for name in names
            for each in of(name, range(head, head + 1) if name in {"query", "key"} else owned[head])
        ]

    return {
        "in_proj_qkvz": by_key_heads("query", "key", "value", "z"),
        "in_proj_ba.weight": by_key_heads("b", "a"),
        "in_proj_qkv": channels,
        "conv1d.weight": channels,
        "in_proj_z": of("z", values),
        **{name: of(name[8], values) for name in ("in_proj_b.weight", "in_proj_a.weight")},
        "A_log": of("a", values),
        "dt_bias": of("a", values),
        "out_proj": of("value", values),
    }


def held(rows: list[Label], ranges: Ranges) -> list[Label]:
    assert all(0 <= first < last <= len(rows) for first, last in ranges)
    return [row for first, last in ranges for row in rows[first:last]]


@given(state=STATES, data=st.data())
def test_every_value_head_is_held_once_beside_its_key_in_every_parameter(
    state: SequenceState, data: st.DataObject
) -> None:
    group, seen = state.heads // state.key_heads, []
    for cut in cuts(data, state):
        keys, values = range(*cut.keys), range(*cut.values)
        assert {each // group for each in values} == set(keys)
        assert len(values) % len(keys) == 0, "each key head of a rank has as many value heads"
        seen += values
        for name, rows in labelled(state).items():
            columns = cut.linear(name).columns if name == "out_proj" else None
            own = held(rows, (columns,) if columns else cut.rows(name))
            assert own == [row for row in rows if row[1] in (keys if row[0] in {"query", "key"} else values)], name
    assert seen == list(range(state.heads))


@given(state=CONVOLUTIONS, data=st.data())
def test_every_channel_is_held_once_in_every_parameter(state: SequenceState, data: st.DataObject) -> None:
    channels, seen = state.channels, []
    for cut in cuts(data, state):
        (own,) = cut.rows("conv.weight")
        assert cut.rows("conv.bias") == (own,)
        assert cut.linear("out_proj").columns == own
        rows = list(range(3 * channels))
        assert [row for first, last in cut.rows("in_proj") for row in rows[first:last]] == [
            row for row in rows if own[0] <= row % channels < own[1]
        ]
        assert cut.own == SequenceState(own[1] - own[0], state.inputs)
        seen += range(*own)
    assert seen == list(range(channels))


@given(state=STATES | CONVOLUTIONS, data=st.data())
def test_the_planner_counts_what_ranks_hold(state: SequenceState, data: st.DataObject) -> None:
    names = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_a") if state.heads else ("in_proj",)
    linears = tuple(Linear(name, outputs_of(name, state), HIDDEN) for name in names)
    last = Linear("out_proj", HIDDEN, state.heads * state.value_dim or state.channels)
    others = of_channels_and_heads(state, bias=False) + HIDDEN
    layer = LayerShape(0, 0, 0, (*linears, last), others, state=state)
    for cut in cuts(data, state):
        if len(cut.shares) == 1:
            continue
        part = portion_of(layer, Portion(cut.shares, cut.rank))
        assert part.state == cut.own
        assert part.other_parameters == of_channels_and_heads(cut.own, bias=False) + HIDDEN
        for linear in part.linears:
            kept = f"{linear.name}.weight"
            rows = cut.rows(linear.name) or cut.rows(kept)
            first, end = cut.linear("out_proj").columns or (0, 0)
            own = (HIDDEN, end - first) if linear.name == "out_proj" else (length(rows), HIDDEN)
            assert (linear.out_features, linear.in_features) == own


@pytest.mark.parametrize(
    ("state", "said"),
    [(attention(1, 2), "3 ranks cannot share 2 heads of linear attention"), (SequenceState(2, 3), "2 channels")],
)
def test_more_ranks_than_there_is_to_share_are_refused(state: SequenceState, said: str) -> None:
    with pytest.raises(InputError, match=said):
        StateCut(state, (1, 1, 1), 0)


def test_a_projection_of_which_nothing_is_known_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="how 'in_proj_x' of a layer with state"):
        StateCut(attention(2, 2), (1, 1), 0).linear("in_proj_x")
