"""Which roles take pages of which, and which layers are computed again: named cases."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.block_names import NO_SALT, packed
from strata_planner.contract.frames import HeldBlock, Survey
from strata_planner.contract.moves import taken_from, why_emptied
from strata_planner.contract.plan import DeviceRef, MicroBatch, Speculation
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.model.kv.paged import HeldPages
from strata_runtime.slot.kept_pages import KeptRole
from strata_runtime.stage.contents import Content
from strata_runtime.stage.inheritance import Inheritance, Refill, weights_through
from tests.laws import share
from tests.runtime.plans import even_plan


@pytest.fixture(scope="module")
def role(shallow_llama: Path) -> Role:
    """Stage 1 of 3 with one layer."""
    (role,) = roles_of(even_plan(shallow_llama, "abc"))["b"]
    return role


EMPTIED: dict[str, tuple[dict[str, Any], str]] = {
    "the same": ({}, ""),
    "other bits: the survey knows better": ({"bits": (4,), "format": ("any4",)}, ""),
    "another number of pages": ({"kv_page_budget": 7}, ""),
    "another replica, stage, neighbours": ({"replica": 3, "stage": 0, "leader": True}, ""),
    "another model": ({"model_uri": "other"}, "another model: other after"),
    "another type": ({"compute_type": "bfloat16"}, "another compute type: bfloat16 after float32"),
    "rounded KV": ({"kv_bits": 8}, "another KV bits: 8 after 16"),
    "other pages": ({"page_tokens": 8}, "another tokens of a page: 8 after 16"),
    "another device": ({"devices": (DeviceRef(type="L4", index=0, usable_bytes=1),)}, "another type of device: L4"),
    "another one of its devices": (
        {"devices": (DeviceRef(type="cpu", index=1, usable_bytes=1),)},
        "index of the device",
    ),
    "several ranks": ({"tensor_parallel": 2}, "several ranks"),
    "state": ({"state_slots": 4}, "keep state"),
    "nothing is shared": ({"prefix_caching": False}, "without prefix caching"),
    "a head": ({"speculation": Speculation("eagle", draft_uri="head", fused=(0, 1, 2))}, "hidden states"),
    "short steps": ({"micro_batch": MicroBatch(1, 1, 15)}, "a step of 15 tokens does not carry a block of 16"),
    "other layers": ({"layers": (2, 2)}, "no layer in common"),
}


@pytest.mark.parametrize(("changes", "reason"), EMPTIED.values(), ids=EMPTIED.keys())
def test_why_pages_are_emptied(role: Role, changes: dict[str, Any], reason: str) -> None:
    told = why_emptied(role, structs.replace(role, **changes))
    assert reason in told
    assert bool(reason) == bool(told)


def test_pages_are_taken_of_the_own_replica_first_and_never_twice(role: Role) -> None:
    def a(replica: int, *layers: int, leader: bool = False) -> Role:
        return structs.replace(role, replica=replica, layers=(layers[0], layers[-1]), leader=leader)

    assert taken_from([a(0, 1), a(1, 1)], [a(1, 1), a(0, 1)]) == {0: 1, 1: 0}
    assert taken_from([a(1, 0, 1, leader=True), a(2, 0, 1)], [a(0, 0, 2, leader=True)]) == {0: 0}
    assert taken_from([a(0, 0, 1)], [a(0, 0), a(0, 1)]) == {0: 0}
    assert taken_from([a(0, 0), a(0, 1, 2)], [a(5, 0, 2)]) == {0: 1}
    assert not taken_from([a(0, 0)], [a(0, 1)])


LAYERS = 12


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """First and last layers of stages."""
    ends = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=4)))
    return list(zip([0, *ends], [end - 1 for end in [*ends, LAYERS]], strict=True))


@settings(max_examples=share(400), deadline=None)
@given(old=cuts(), new=cuts(), data=st.data(), changed=st.none() | st.integers(0, LAYERS - 1), logs=st.booleans())
def test_what_is_lacking_is_computed_from_what_is_there(
    shallow_llama: Path,
    old: list[tuple[int, int]],
    new: list[tuple[int, int]],
    data: st.DataObject,
    changed: int | None,
    *,
    logs: bool,
) -> None:
    """However stages were cut and are cut, which of them are left and which layer has other weights: every layer that lacks what blocks hold computes, every
    one of those computes from the one before, or from rows that are kept; and whatever is handed on is kept for the next loss.
    """
    (one,) = roles_of(even_plan(shallow_llama, "a"))["a"]
    before = [f"w{number}" for number in range(LAYERS)]
    now = [name + "!" * (number == changed) for number, name in enumerate(before)]
    through = weights_through("", tuple(before))
    first_block = {0: Content(NO_SALT, packed(range(16)), b"n" * 16)}
    slots: list[Inheritance | None] = []
    for first, last in new:  # each goes on from one of the old stages, or from none
        source = data.draw(st.none() | st.sampled_from(old))
        taken = [] if source is None else [n for n in range(source[0], source[1] + 1) if first <= n <= last]
        kept = {number: through[number] for number in taken}
        slots.append(
            Inheritance(0, 5, kept, source[1] + 1 if logs and source else 0, first_block) if source and kept else None
        )
    survey, roles = Survey(0, 6), []
    for place, ((first, last), slot) in enumerate(zip(new, slots, strict=True)):
        head = last == LAYERS - 1
        role = structs.replace(one, layers=(first, last), stage=place, leader=place == 0, head=head)
        weights = weights_through(survey.weights, tuple(now[first : last + 1]))
        survey = (slot or Inheritance()).answer(survey, role, weights)
        roles.append(role)
    holding = {number for slot in slots if slot for number in slot.through if changed is None or number < changed}
    assert survey.layers == LAYERS
    assert survey.blocks == ([HeldBlock(0, NO_SALT, packed(range(16)))] if holding else None)
    begin, end = survey.refill
    assert set(range(LAYERS)) - holding <= set(range(begin, end))
    if begin == end:
        return
    parts = [Refill.of((begin, end), role) for role in roles]
    assert [number for part in parts for number in part.layers] == list(range(begin, end))
    for part, role, slot, behind in zip(parts, roles, slots, [*parts[1:], None], strict=True):
        if behind is not None:
            assert part.sends == behind.receives
        if part.reads_log:
            assert slot
            assert slot.boundary == begin
            assert changed is None or begin <= changed
        if part.layers and not part.reads_log:
            assert part.receives
        assert part.writes_log == (bool(part.layers) and role.layers[1] < end and not role.head)
    assert begin == 0 or sum(part.reads_log for part in parts) == 1


def test_pages_of_another_epoch_or_replica_are_computed_again(role: Role) -> None:
    """As those before them have told, whoever leads; the first to hold any says of which they are."""
    through = weights_through("", ("w0", "w1"))
    held = {3: Content(NO_SALT, packed(range(16)), b"n" * 16)}
    mine = Inheritance(2, 5, {1: through[1]}, 2, held)
    asked = Survey(0, 6, through[0], 1)
    first = mine.answer(asked, role, through[1:])
    assert (first.lacking, first.starts, first.before, first.formed) == ((0, 0), (2,), 2, 5)
    assert first.blocks == [HeldBlock(3, NO_SALT, packed(range(16)))]
    for formed, before in [(4, 2), (5, 0)]:
        told = structs.replace(asked, formed=formed, before=before, blocks=[HeldBlock(3, NO_SALT, packed(range(16)))])
        other = mine.answer(told, role, through[1:])
        assert (other.lacking, other.starts, other.blocks) == ((1, 2), (), told.blocks)


def test_what_is_kept_is_shrunk_with_its_pages(role: Role) -> None:
    held = {number: Content(NO_SALT, b"", b"n" * 16) for number in (0, 6, 7, 40)}
    kept = KeptRole(role, HeldPages(), Inheritance(0, 5, {1: "w", 2: "w"}, 2, held))
    left = kept.shrunk(structs.replace(role, kv_page_budget=7)).inherited
    assert (dict(left.through), set(left.blocks)) == (
        dict.fromkeys(range(role.layers[0], role.layers[1] + 1), "w"),
        {0, 6},
    )


SURVEYS: dict[str, tuple[tuple[int, int], tuple[int, ...], tuple[int, ...], tuple[int, int], int]] = {
    "nothing is lost": ((0, 0), (4,), (0, 1), (0, 0), 4),
    "nothing is kept": ((4, 8), (), (), (0, 8), 4),
    "all is kept": ((4, 8), (4,), (), (4, 8), 4),
    "three of four are: 4 layers of these and 12 of one, less than 8 of all": ((4, 8), (4,), (1,), (4, 8), 3),
    "two of four are: 8 layers of all": ((4, 8), (4,), (1, 2), (0, 8), 4),
    "what nobody has beside": ((4, 8), (4,), (9, 10, 11), (4, 8), 4),
    "what is kept behind them": ((2, 8), (4,), (), (0, 8), 4),
}


@pytest.mark.parametrize(("lacking", "starts", "unlogged", "refill", "going_on"), SURVEYS.values(), ids=SURVEYS.keys())
def test_layers_begin_where_inputs_are_kept_if_that_is_less_in_all(
    lacking: tuple[int, int], starts: tuple[int, ...], unlogged: tuple[int, ...], refill: tuple[int, int], going_on: int
) -> None:
    blocks = [HeldBlock(block, b"%016d" % block) for block in range(4)]
    survey = Survey(0, 6, layers=12, lacking=lacking, starts=starts, blocks=blocks, unlogged=unlogged)
    assert (survey.refill, len(survey.going_on)) == (refill, going_on)
    assert not refill[0] or {each.block for each in survey.going_on}.isdisjoint(unlogged)
