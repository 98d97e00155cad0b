"""KV stays where its layer stays: a slot is lost, the leader too, its neighbours take over, and only what lost its pages is computed again."""

from pathlib import Path

import pytest
from msgspec import structs

from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.streams import Streams, asked, bound, computed_again, drained, plan_of, with_layers

CASES = {
    "the middle one, from the tokens": ("b", "ac", (2, 5), False, 4),
    "the middle one, from the log": ("b", "ac", (2, 5), True, 2),
    "the middle one, all to the one before": ("b", "ac", (3, 5), True, 2),
    "the middle one, all to the one behind": ("b", "ac", (1, 5), True, 2),
    "the middle one is there again": ("b", "abc", (1, 3, 5), True, 2),
    "the middle one is there again, without a log": ("b", "abc", (1, 3, 5), False, 4),
    "the last one, from the tokens: all of it": ("c", "ab", (1, 5), False, 0),
    "the last one, from the log": ("c", "ab", (1, 5), True, 2),
    "the last one, and a layer moves": ("c", "ab", (2, 5), True, 2),
    "the leader, all to the one behind": ("a", "bc", (3, 5), False, 2),
    "the leader, and a layer moves": ("a", "bc", (2, 5), True, 2),
    "the leader is there again": ("a", "abc", (1, 3, 5), True, 2),
    "the leader, and all others get other layers": ("a", "cb", (3, 5), False, 2),
    "the leader and the last one: no layer is spared": ("ac", "b", (5,), True, 0),
    "the leader and the middle one are there again": ("ab", "abc", (1, 3, 5), True, 4),
}


KEPT = (
    "the middle one, from the log",
    "the leader, and a layer moves",
)


@pytest.mark.parametrize("case", swept(CASES, KEPT))
def test_neighbours_take_over(tiny_llama: Path, expected: dict[str, list[int]], case: str) -> None:
    """Of what lies in blocks just the lost layers are computed again, or those before them too, none that moved between who lives; and the text stays."""
    lost, survivors, ends, log, layers = CASES[case]
    with PipelineHarness("abc") as pipeline:
        streams = Streams(asked(1))
        leader = pipeline.serve(before := plan_of(tiny_llama, "abc", log=log))
        bound(pipeline, before, streams.all * 3 // 4)
        streams.send(leader)
        streams.listen(leader, streams.all // 2)
        for each in lost:
            pipeline.restart(each)
        if "a" not in lost:
            drained(streams, leader)
        replayed = {name: len(streams.submits[name].prompt) + len(got) for name, got in streams.tokens.items()}
        after = with_layers(plan_of(tiny_llama, survivors, log=log), *ends)
        leader = pipeline.serve(after)
        streams.send(leader)
        streams.listen(leader, streams.all)
        assert streams.tokens == expected
        again = computed_again(pipeline, after)
        assert again % max(layers, 1) == 0
        assert (again > 0) == (layers > 0)
        assert again <= layers * sum(replayed.values())


CHAINS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "others": [("b", "ac", (2, 5)), ("c", "ab", (2, 5)), ("b", "abc", (0, 3, 5)), ("c", "a", (5,))],
    "leaders": [("a", "bc", (2, 5)), ("b", "ca", (3, 5)), ("c", "abc", (1, 3, 5)), ("a", "abc", (1, 3, 5))],
    "both": [
        ("a", "abc", (1, 3, 5)),
        ("b", "ac", (3, 5)),
        ("a", "cb", (1, 5)),
        ("b", "c", (5,)),
        ("c", "abc", (0, 3, 5)),
    ],
}


@pytest.mark.slow  # one loss above
@pytest.mark.parametrize("name", swept(CHAINS, ["leaders"]))
def test_one_loss_after_another(tiny_llama: Path, expected: dict[str, list[int]], name: str) -> None:
    """Also before all is whole again."""
    with PipelineHarness("abc") as pipeline:
        streams = Streams(asked(1))
        leader = pipeline.serve(plan_of(tiny_llama, "abc", log=True))
        leads = "a"
        for lost, slots, ends in CHAINS[name]:
            streams.send(leader)
            streams.listen(leader, min(streams.count + 8, streams.all))
            pipeline.restart(lost)
            if lost != leads:
                drained(streams, leader)
            leads = slots[0]
            leader = pipeline.serve(with_layers(plan_of(tiny_llama, slots, log=True), *ends))
        streams.send(leader)
        streams.listen(leader, streams.all)
        assert streams.tokens == expected


# Pages of the pool since, and of the log.
SIZES = {"fewer": (24, 64), "more": (100, 64), "a log of fewer": (64, 4)}


@pytest.mark.slow  # the test above has pools of one size
@pytest.mark.parametrize("name", swept(SIZES, ["a log of fewer"]))
def test_pages_move_to_a_pool_of_another_size(tiny_llama: Path, expected: dict[str, list[int]], name: str) -> None:
    pages, logged = SIZES[name]
    with PipelineHarness("abc") as pipeline:
        streams = Streams(asked(1))
        leader = pipeline.serve(before := plan_of(tiny_llama, "abc", log=True, logged=logged))
        bound(pipeline, before, streams.all * 3 // 4)
        streams.send(leader)
        streams.listen(leader, streams.all // 2)
        pipeline.restart("b")
        drained(streams, leader)
        after = plan_of(tiny_llama, "ac", log=True, pages=pages, logged=logged)
        leader = pipeline.serve(after)
        streams.send(leader)
        streams.listen(leader, streams.all)
        assert streams.tokens == expected
        assert computed_again(pipeline, after)


def test_pages_of_other_weights_are_never_served(tiny_llama: Path) -> None:
    """A layer gets other bits with the next epoch: what it and those behind it hold is computed again, to the same text as in a pipeline that never had others."""
    four = plan_of(tiny_llama, "ab", log=True)
    formats = ("dense", "dense", "any4", "dense", "dense", "dense")
    other = structs.replace(even_plan(tiny_llama, "ab", formats=formats, pages=64), boundary_log_pages=64)
    submits = [structs.replace(each, max_tokens=8) for each in asked(2)]
    with PipelineHarness("ab") as pipeline:
        wanted = pipeline.serve(other).generate(submits)
    with PipelineHarness("ab") as pipeline:
        pipeline.serve(four).generate(submits)
        assert pipeline.serve(other).generate(submits) == wanted
        assert pipeline.serve(other).generate(submits) == wanted


def test_what_an_epoch_leaves_is_found_in_the_next(tiny_llama: Path) -> None:
    """Nothing is lost where nothing moves: the same plan again."""
    plan = plan_of(tiny_llama, "abc", log=False)
    with PipelineHarness("abc") as pipeline:
        text = pipeline.serve(plan).generate([greedy("r", range(3, 50), 8)])
        leader = pipeline.serve(plan)
        leader.send(greedy("r", range(3, 50), 8))
        first = leader.events()[0]
        assert first.found == 46  # all but its last token
        assert {"r": [first.token, *leader.collect(["r"])["r"]]} == text
        assert computed_again(pipeline, plan) == 0


def test_a_failed_role_keeps_nothing(tiny_llama: Path) -> None:
    with PipelineHarness("ab") as pipeline:
        leader = pipeline.serve(plan_of(tiny_llama, "ab", log=False))
        leader.generate([greedy("r", range(3, 50), 2)])
        running = pipeline.threads["b"].slot._running
        assert running is not None
        running.roles[0]._failure("a kernel has failed")
        del running
        leader = pipeline.serve(plan_of(tiny_llama, "ab", log=False))
        leader.send(greedy("r", range(3, 50), 2))
        assert leader.events()[0].found == 0
