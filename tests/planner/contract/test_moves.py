"""Where pages go when roles change: laws over any two shapes of a pipeline."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.control import SlotAddress
from strata_planner.contract.moves import layers_in_common, moves_between, page_orders, taken_from
from strata_planner.contract.plan import DeviceRef, MicroBatch
from strata_planner.contract.roles import Neighbour, Role

LAYERS, SLOTS = 8, "abcd"
ADDRESSES = {slot: SlotAddress(slot, 1, 2, 3, 4) for slot in SLOTS}
Roles = dict[str, tuple[Role, ...]]


def a_role(slot: str, stage: int, stages: int, layers: tuple[int, int]) -> Role:
    return Role(
        replica=0,
        stage=stage,
        stages=stages,
        devices=(DeviceRef("cpu", 0, 1),),
        tensor_parallel=1,
        leader=stage == 0,
        layers=layers,
        bits=(16,) * (layers[1] - layers[0] + 1),
        format=("dense",) * (layers[1] - layers[0] + 1),
        kv_bits=16,
        kv_page_budget=4,
        replica_page_budget=4,
        page_tokens=16,
        embedding=stage == 0,
        head=stage == stages - 1,
        model_uri="model",
        compute_type="float32",
        max_model_len=64,
        micro_batch=MicroBatch(1, 1, 16),
        predicted_bytes=1,
        next=Neighbour(slot, 0),
        previous=Neighbour(slot, 0),
    )


def roles(slots: Sequence[str], ends: Sequence[int]) -> Roles:
    found: Roles = {}
    for stage, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        first = ends[stage - 1] + 1 if stage else 0
        found[slot] = (*found.get(slot, ()), a_role(slot, stage, len(slots), (first, end)))
    return found


def pipelines() -> st.SearchStrategy[Roles]:
    """One to four stages; a slot may have several."""

    def shaped(slots: list[str]) -> st.SearchStrategy[Roles]:
        count = len(slots) - 1
        cuts = st.lists(st.integers(0, LAYERS - 2), min_size=count, max_size=count, unique=True)
        return cuts.map(lambda ends: roles(slots, [*sorted(ends), LAYERS - 1]))

    return st.lists(st.sampled_from(SLOTS), min_size=1, max_size=4).flatmap(shaped)


def layers_of(role: Role) -> range:
    return range(role.layers[0], role.layers[1] + 1)


@given(old=pipelines(), new=pipelines())
def test_every_layer_stays_or_comes_once_from_who_has_it(old: Roles, new: Roles) -> None:
    moves = moves_between(old, new)
    for slot, its in new.items():
        taken = taken_from(old.get(slot, ()), its)
        for place, role in enumerate(its):
            stays = set(layers_in_common(old[slot][taken[place]], role)) if place in taken else set()
            comes = [layer for move in moves if (move.taker, move.stage) == (slot, role.stage) for layer in move.layers]
            assert sorted([*comes, *stays]) == list(layers_of(role))
    for move in moves:
        assert set(move.layers) <= {layer for role in old[move.giver] for layer in layers_of(role)}


@given(old=pipelines(), new=pipelines(), without=st.sets(st.sampled_from(SLOTS)))
def test_givers_and_takers_are_told_the_same(old: Roles, new: Roles, without: set[str]) -> None:
    """Also where slots have no port for pages: nobody is sent to them."""
    moves = moves_between(old, new)
    addresses = {
        slot: structs.replace(each, pages_port=0 if slot in without else 4) for slot, each in ADDRESSES.items()
    }
    orders = page_orders(moves, addresses, "key")
    sources = [source for each in orders.sources.values() for source in each]
    assert not {source.slot for source in sources} & without
    assert {slot: giving.takers for slot, giving in orders.giving.items()} == {
        slot: sum(source.slot == slot for source in sources) for slot in {source.slot for source in sources}
    }
    assert all(source.key == orders.giving[source.slot].key for source in sources)


@given(old=pipelines(), new=pipelines(), lost=st.sets(st.sampled_from(SLOTS)))
def test_takers_know_whether_their_replica_waits(old: Roles, new: Roles, lost: set[str]) -> None:
    living = {slot: each for slot, each in old.items() if slot not in lost}
    moves = moves_between(living, new)
    assert {move.waits for move in moves} <= {len(living) < len(old)}
    orders = page_orders(moves, ADDRESSES, "key")
    assert {source.waits for each in orders.sources.values() for source in each} == {move.waits for move in moves}


@given(pipelines())
def test_nothing_moves_where_nothing_changes(old: Roles) -> None:
    assert not moves_between(old, old)


@given(old=pipelines(), new=pipelines())
def test_nothing_moves_between_roles_that_do_not_fit(old: Roles, new: Roles) -> None:
    others = {slot: tuple(structs.replace(role, page_tokens=8) for role in each) for slot, each in new.items()}
    assert not moves_between(old, others)
