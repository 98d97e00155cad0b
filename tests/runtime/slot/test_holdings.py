"""What a stage notes of its steps, and what of it the next epoch gets: named cases."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.block_names import NO_SALT, root_of
from strata_planner.contract.frames import FrameHeader, Open, Sampling, Segment, Survey
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.stage.holdings import Holdings
from strata_runtime.stage.inheritance import Inheritance
from tests.runtime.plans import even_plan

PAGES = 64


@pytest.fixture
def role(shallow_llama: Path) -> Role:
    """Stage 0, with two layers: it hands on the inputs of layer 2."""
    (role,) = roles_of(even_plan(shallow_llama, "ab"))["a"]
    return structs.replace(role, layers=(0, 1), boundary_log_pages=PAGES)


def step(
    number: int, tokens: Sequence[int], start: int, *, blocks: Sequence[int], weights: str = "", **fields: Any
) -> FrameHeader:
    segment = Segment(7, start, len(tokens), 0, tuple(blocks))
    return FrameHeader(0, 6, number, weights, [segment], [], "float32", 8, tokens=list(tokens), **fields)


def run(holdings: Holdings, header: FrameHeader, table: Sequence[int]) -> None:
    holdings.run_with(header.weights)
    holdings.computed(header, [table])


def blocks_of(holdings: Holdings, table: Sequence[int]) -> set[int]:
    return set(holdings.left(6, [table]).blocks)


def logged(left: Inheritance) -> set[int]:
    """Blocks of which the inputs of layer 2 are kept."""
    return set(left.blocks) - left.unlogged if left.boundary == 2 else set()


def test_blocks_with_something_of_other_weights_are_not_known_and_neither_is_what_follows(role: Role) -> None:
    holdings = Holdings(role, ("w", "v"))
    run(holdings, step(0, range(20), 0, blocks=[0, 1]), [0, 1])
    assert blocks_of(holdings, [0, 1]) == {0, 1}
    holdings.own = ("w", "x")
    run(holdings, step(1, range(20), 20, blocks=[2]), [0, 1, 2])
    assert not blocks_of(holdings, [0, 1, 2])
    run(holdings, step(2, range(16), 0, blocks=[3]), [3])
    assert blocks_of(holdings, [3]) == {3}


def test_a_salt_is_part_of_a_name(role: Role) -> None:
    holdings = Holdings(role, ("w", "v"))
    for root in (b"", root_of("mine")):
        holdings.open(Open(7, Sampling(), root=root))
        run(holdings, step(0, range(16), 0, blocks=[0]), [0])
        assert holdings.left(6, []).blocks[0].parent == (root or NO_SALT)
        holdings.free(7, [0])


LOGS: dict[str, tuple[int | None, tuple[int, int] | None, int, set[int], set[int]]] = {
    "kept": (PAGES, None, PAGES, {0, 1}, {0, 1}),
    "kept of one page": (1, None, PAGES, {0}, {0, 1}),
    "kept, with room for one page now": (PAGES, None, 1, {0}, {0, 1}),
    "not kept": (None, None, PAGES, set(), {0, 1}),
    "not kept, and lost layers behind are filled again": (None, (0, 3), PAGES, {0}, {0}),
    "kept, and lost layers behind are filled again": (PAGES, (0, 3), PAGES, {0, 1}, {0, 1}),
    "kept, and a layer of its own is filled again": (PAGES, (0, 1), PAGES, {0, 1}, {0, 1}),
    "not kept, and a layer of its own is filled again": (None, (0, 1), PAGES, set(), {0, 1}),
}


@pytest.mark.parametrize(("kept", "refill", "room", "with_inputs", "blocks"), LOGS.values(), ids=LOGS.keys())
def test_of_which_blocks_inputs_are_logged(
    role: Role, kept: int | None, refill: tuple[int, int] | None, room: int, with_inputs: set[int], blocks: set[int]
) -> None:
    first = Holdings(role, ("w", "v"), log_pages=kept)
    run(first, step(0, range(32), 0, blocks=[0, 1]), [0, 1])
    again = Holdings(role, ("w", "v"), first.left(5, []), log_pages=room)
    survey = again.survey(Survey(0, 6), begins_anywhere=True)
    assert survey.starts == ((2,) if kept else ())
    assert survey.unlogged == ((1,) if 1 in (kept, room) else ())
    assert {each.block for each in survey.blocks or []} == {0, 1}
    if refill is not None:
        run(again, step(0, range(16), 0, blocks=[0], refill=refill), [0])
    left = again.left(6, [])
    assert (logged(left), set(left.blocks)) == (with_inputs, blocks)


def test_what_was_lost_is_known_again_when_it_is_filled_and_logged_if_it_was_passed(role: Role) -> None:
    """A layer of its own is lost, and the log is not of its last one: what is filled without being handed on leaves no inputs."""
    cases: list[tuple[tuple[int, int], set[int]]] = [((0, 1), set()), ((0, 3), {0})]
    for refill, with_inputs in cases:
        first = Holdings(role, ("w", "v"))
        run(first, step(0, range(16), 0, blocks=[0]), [0])
        again = Holdings(role, ("w", "v"), first.left(5, []).of([1], 64), log_pages=PAGES)
        assert again.survey(Survey(0, 6), begins_anywhere=True).lacking == (0, 1)
        assert not blocks_of(again, [0])
        run(again, step(0, range(16), 0, blocks=[0], refill=refill), [0])
        left = again.left(6, [])
        assert (logged(left), set(left.blocks)) == (with_inputs, {0})
