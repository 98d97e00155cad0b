"""Layers that move between slots that live bring their KV: over a planned change nothing is computed again, and the text stays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.control import GetStatus
from strata_planner.contract.plan import Plan
from strata_runtime.slot.slot import Slot
from tests.laws import share, swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.streams import Streams, asked, bound, computed_again, drained, plan_of, with_layers

LAST = 5  # layer of the model


def plan_with(model: Path, slots: str, ends: Sequence[int], pages: int = 64) -> Plan:
    return with_layers(plan_of(model, slots, log=False, pages=pages), *ends)


def prompts_again(pipeline: PipelineHarness, plan: Plan) -> int:
    """Tokens that went through all layers, as prompts do."""
    return pipeline.slots[plan.replicas[0].stages[0].slot].ask(GetStatus()).roles[0].prefill_tokens


def moved(pipeline: PipelineHarness, plans: Sequence[Plan]) -> tuple[Streams, list[tuple[int, int]]]:
    """The streams, over one plan after another to their ends; of each but the first, what was computed again: tokens x layers of blocks, and tokens of prompts."""
    streams, again = Streams(asked(1)), []
    leader = pipeline.serve(plans[0])
    for number, plan in enumerate(plans):
        if number:
            drained(streams, leader)
            leader = pipeline.serve(plan)
        until, so_far = streams.all * (number + 1) // len(plans), streams.count
        if number + 1 < len(plans):
            bound(pipeline, plan, until - so_far)
        streams.send(leader)
        streams.listen(leader, until)
        if number:
            again.append((computed_again(pipeline, plan), prompts_again(pipeline, plan)))
    return streams, again


MOVES: dict[str, tuple[tuple[str, Sequence[int]], tuple[str, Sequence[int]]]] = {
    "to the one behind": (("ab", (3, 5)), ("ab", (1, 5))),
    "to the leader": (("ab", (1, 5)), ("ab", (3, 5))),
    "to one that is new, from both sides": (("ac", (2, 5)), ("abc", (1, 3, 5))),
    "to one that is new at the end": (("ab", (2, 5)), ("abc", (1, 3, 5))),
    "to one that leads now": (("bc", (3, 5)), ("abc", (1, 3, 5))),
    "of one slot, to two": (("a", (5,)), ("ab", (2, 5))),
    "past a neighbour": (("abc", (0, 2, 5)), ("abc", (3, 4, 5))),
    "of a slot that keeps no layer": (("abc", (1, 3, 5)), ("abc", (3, 4, 5))),
    "of the middle one, which is drained, to both sides": (("abc", (1, 3, 5)), ("ac", (2, 5))),
    "of the leader, which is drained": (("abc", (1, 3, 5)), ("bc", (3, 5))),
    "of the last one, which is drained": (("abc", (1, 3, 5)), ("ab", (1, 5))),
    "of two of three, which are drained, to one": (("abc", (1, 3, 5)), ("b", (5,))),
    "of all: others have every layer": (("ab", (2, 5)), ("c", (5,))),
}


@pytest.mark.parametrize("name", swept(MOVES, ["to the one behind", "to one that leads now"]))
def test_pages_move_with_their_layers(tiny_llama: Path, expected: dict[str, list[int]], name: str) -> None:
    with PipelineHarness("abc") as pipeline:
        streams, again = moved(pipeline, [plan_with(tiny_llama, *each) for each in MOVES[name]])
    assert streams.tokens == expected
    assert again == [(0, 0)]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    """Slots in any order, some of them left out, and the last layer of each."""
    slots = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    count = len(slots) - 1
    firsts = draw(st.lists(st.integers(0, LAST - 1), min_size=count, max_size=count, unique=True))
    return "".join(slots), (*sorted(firsts), LAST)


@settings(max_examples=share(32, 16), deadline=None)
@given(chain=st.lists(shapes(), min_size=2, max_size=3), pages=st.sampled_from([40, 64]))
def test_the_text_stays_over_any_moves_and_drains_and_nothing_is_computed_again(
    tiny_llama: Path, expected: dict[str, list[int]], chain: list[tuple[str, tuple[int, ...]]], pages: int
) -> None:
    """Also where a layer moves past a neighbour, all move, or the leader is drained."""
    plans = [plan_with(tiny_llama, *each, pages if number else 64) for number, each in enumerate(chain)]
    with PipelineHarness("abc") as pipeline:
        streams, again = moved(pipeline, plans)
    assert streams.tokens == expected
    if pages == 64:
        assert again == [(0, 0)] * (len(chain) - 1)


def test_what_other_weights_computed_is_not_taken(tiny_llama: Path) -> None:
    """A layer in front of the moved one has other bits now: both are computed again, to the text of a pipeline that never had others."""
    formats = ("dense", "any4", "dense", "dense", "dense", "dense")
    other = even_plan(tiny_llama, "ab", formats=formats, pages=64)
    submits = asked(2)
    with PipelineHarness("ab") as pipeline:
        wanted = pipeline.serve(other).generate(submits)
    with PipelineHarness("ab") as pipeline:
        pipeline.serve(plan_with(tiny_llama, "ab", (3, 5))).generate(submits)
        assert pipeline.serve(other).generate(submits) == wanted


@pytest.mark.slow  # test_givers.py has who gives and dies, chain/test_losses.py who takes
@pytest.mark.parametrize("dies", ["a", "b"])
def test_who_dies_in_the_middle_is_replaced(
    tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """The giver has committed and the other has not, or the other way round; then one of them is gone."""
    before, after = (plan_with(tiny_llama, *each) for each in MOVES["to the one behind"])
    commits: list[str] = []
    real: Any = Slot._commit

    def commit(slot: Slot, epoch: int) -> None:
        commits.append(slot._name)
        if epoch != 2 or slot._name == ("b" if dies == "a" else "a"):
            real(slot, epoch)

    monkeypatch.setattr(Slot, "_commit", commit)
    with PipelineHarness("ab") as pipeline:
        streams = Streams(asked(1))
        leader = pipeline.serve(before)
        bound(pipeline, before, streams.all // 2)
        streams.send(leader)
        streams.listen(leader, streams.all // 2)
        drained(streams, leader)
        with pytest.raises(Exception, match="did not commit"):
            pipeline.serve(after)
        pipeline.restart(dies)
        leader = pipeline.serve(after)
        streams.send(leader)
        streams.listen(leader, streams.all)
    assert streams.tokens == expected
