"""What a stage says of its blocks is what lies in them, whatever was computed where; and what stages agree upon lies in all of them."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.block_names import NO_SALT, TOKEN_BYTES, alike, name_of, packed, root_of
from strata_planner.contract.frames import HeldBlock
from strata_runtime.stage.contents import Content, Contents, in_common, told
from tests.laws import share

SIZE = 4
SALTED = root_of("mine")


class Written(NamedTuple):
    """A step's part in one sequence: which blocks its table has, from which position on how many tokens, drawn from two, and whether by draft weights."""

    table: list[int]
    start: int
    tokens: list[int]
    root: bytes
    draft: bool


@st.composite
def written(draw: st.DrawFn) -> Written:
    table = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    start = draw(st.integers(0, len(table) * SIZE - 1))
    tokens = draw(st.lists(st.integers(1, 2), min_size=1, max_size=len(table) * SIZE - start))
    return Written(
        table,
        start,
        tokens,
        draw(st.sampled_from([NO_SALT, NO_SALT, SALTED])),
        draw(st.sampled_from([False, False, True])),
    )


class Pages:
    """What really lies in each position: root and text up to it, as the position before had it when it was computed; drafts leave what nobody else would."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}

    def write(self, step: Written) -> None:
        for position, token in enumerate(step.tokens, start=step.start):
            before = (
                (step.root, ()) if not position else self.texts.get(self._place(step.table, position - 1), (b"", ()))
            )
            self.texts[self._place(step.table, position)] = (b"" if step.draft else before[0], (*before[1], token))

    @staticmethod
    def _place(table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // SIZE], position % SIZE

    def check(self, held: HeldBlock | None, block: int, content: Content) -> None:
        count = len(content.tokens) // TOKEN_BYTES
        root, text = self.texts[block, count - 1]
        assert root, "what nobody computes alike is told of"
        for place in range(count):
            assert self.texts[block, place] == (root, text[: len(text) - count + place + 1])
        names = [root]
        for first in range(0, len(text) // SIZE * SIZE, SIZE):
            names.append(name_of(names[-1], packed(text[first : first + SIZE])))
        is_full = count == SIZE
        assert (content.parent, content.name) == (names[-2 if is_full else -1], names[-1] if is_full else b"")
        assert content.tokens == packed(text[len(text) - count :])
        told = [
            HeldBlock(block, content.parent, content.tokens),
            *([HeldBlock(block, content.name)] if is_full else []),
        ]
        assert held is None or held in told


@settings(max_examples=share(400), deadline=None)
@given(steps=st.lists(written(), max_size=14), behind=st.integers(0, 3))
def test_what_is_told_lies_there(steps: list[Written], behind: int) -> None:
    """Of a stage, and of one that is some steps behind it: also where blocks are written over in the midst, shared, or filled by drafts."""
    pages, stages = (Pages(), Pages()), (Contents(SIZE), Contents(SIZE))
    for place, (one, contents) in enumerate(zip(pages, stages, strict=True)):
        for step in steps[: len(steps) - behind * place]:
            one.write(step)
            if step.draft:
                contents.spoil(step.table, step.start)
            else:
                contents.write(step.table, step.root, step.start, packed(step.tokens))
        left = contents.left([range(6)])
        for each in told(left):
            one.check(each, each.block, left[each.block])
    ahead, later = (contents.left([range(6)]) for contents in stages)
    for each in in_common(told(ahead), later):
        for one, left in zip(pages, (ahead, later), strict=True):
            held = left[each.block]
            one.check(None, each.block, held)
            assert each.name == (held.parent if each.tokens else held.name)
            assert alike(each.tokens, held.tokens) == len(each.tokens) // TOKEN_BYTES


def full(parent: bytes, *tokens: int) -> Content:
    return Content(parent, packed(tokens), name_of(parent, packed(tokens)))


def begun(parent: bytes, *tokens: int) -> Content:
    return Content(parent, packed(tokens), b"")


ONE, OTHER = full(NO_SALT, 1, 2, 3, 4), full(NO_SALT, 1, 2, 3, 5)
COMMON: dict[str, tuple[Content, Content | None, HeldBlock | None]] = {
    "the same": (ONE, ONE, HeldBlock(7, NO_SALT, ONE.tokens)),
    "another, in the end": (ONE, OTHER, HeldBlock(7, NO_SALT, packed([1, 2, 3]))),
    "another": (ONE, full(NO_SALT, 2, 2, 3, 4), None),
    "nothing": (ONE, None, None),
    "one is further": (begun(ONE.name, 1, 2, 3), begun(ONE.name, 1), HeldBlock(7, ONE.name, packed([1]))),
    "texts part": (begun(ONE.name, 1, 2, 3), begun(ONE.name, 1, 3, 3), HeldBlock(7, ONE.name, packed([1]))),
    "they part at once": (begun(ONE.name, 1), begun(ONE.name, 2), None),
    "behind another block": (begun(ONE.name, 1), begun(OTHER.name, 1), None),
    "full in the later one": (begun(ONE.name, 1), full(ONE.name, 1, 2, 3, 4), HeldBlock(7, ONE.name, packed([1]))),
    "full in the first one": (full(ONE.name, 1, 2, 3, 4), begun(ONE.name, 1), HeldBlock(7, ONE.name, packed([1]))),
}


@pytest.mark.parametrize(("one", "other", "common"), COMMON.values(), ids=COMMON.keys())
def test_what_stages_have_in_common(one: Content, other: Content | None, common: HeldBlock | None) -> None:
    assert in_common(told({7: one}), {} if other is None else {7: other}) == ([common] if common else [])


def test_what_others_follow_is_told_by_name_alone() -> None:
    later = full(ONE.name, 1, 2, 3, 4)
    blocks = {3: ONE, 4: later}
    assert told(blocks) == [HeldBlock(3, ONE.name), HeldBlock(4, ONE.name, later.tokens)]
    assert in_common(told(blocks), blocks) == told(blocks)
    assert in_common(told(blocks), {3: OTHER, 4: later}) == [HeldBlock(4, ONE.name, later.tokens)]


def test_what_is_unused_longest_is_first_and_what_nobody_goes_on_from_is_forgotten() -> None:
    contents = Contents(SIZE)
    contents.write([3], NO_SALT, 0, packed([1, 1, 1, 1]))
    contents.write([0, 1, 2], NO_SALT, 0, packed([1] * 10))
    contents.write([4, 5], NO_SALT, 0, packed([2] * 6))
    contents.give_back([0, 1, 2])
    assert list(contents.left([[4, 5]])) == [3, 1, 0, 5, 4]
    assert list(contents.left([])) == [3, 4, 1, 0]
