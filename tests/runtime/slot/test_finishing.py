"""A change of epoch without a loss lets the steps under way come to their ends; one with a loss waits for nobody."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.frames import Segment
from strata_runtime.slot import finishing
from strata_runtime.stage.sampler import Sampler
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.streams import Streams, asked, bound, drained, plan_of, undisturbed, with_layers
from tests.runtime.slot.test_moved_pages import MOVES

NEVER_SECONDS = 600.0  # longer than a client waits for the answer to a commit


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of any head has made."""
    counts: list[int] = []
    real: Any = Sampler.sample

    def sample(self: Sampler, segments: Sequence[Segment], outputs: Any) -> Any:
        tokens = real(self, segments, outputs)
        counts.append(len(tokens))
        return tokens

    monkeypatch.setattr(Sampler, "sample", sample)
    monkeypatch.setattr(finishing, "FINISH_SECONDS", NEVER_SECONDS)
    return counts


@pytest.mark.parametrize(
    "name",
    ["to one that is new, from both sides", "of the leader, which is drained", "of all: others have every layer"],
)
def test_what_is_under_way_reaches_its_client_before_the_epoch_ends(
    tiny_llama: Path, sampled: list[int], name: str
) -> None:
    before, after = (with_layers(plan_of(tiny_llama, slots, log=False), *ends) for slots, ends in MOVES[name])
    streams = Streams(asked(1))
    with PipelineHarness("abc") as pipeline:
        leader = pipeline.serve(before)
        bound(pipeline, before, streams.all // 2)
        names = list(pipeline.prepare(after))
        for each in names:
            pipeline.slots[each].until(lambda status: status.prepare.phase == "prepared")
        streams.send(leader)
        streams.listen(leader, len(streams.tokens))
        second = pipeline.commit(after, names)
        drained(streams, leader)
        assert streams.count == sum(sampled) < streams.all
        streams.send(second)
        streams.listen(second, streams.all)
    assert streams.tokens == undisturbed(tiny_llama)


@pytest.mark.parametrize("lost", ["a", "b", "d"])
def test_nobody_waits_for_steps_that_a_lost_slot_was_to_compute(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Also who is no neighbour of it."""
    monkeypatch.setattr(finishing, "FINISH_SECONDS", NEVER_SECONDS)
    streams = Streams(asked(1))
    with PipelineHarness("abcd") as pipeline:
        leader = pipeline.serve(with_layers(plan_of(tiny_llama, "abcd", log=False), 0, 2, 4, 5))
        streams.send(leader)
        streams.listen(leader, len(streams.tokens))
        pipeline.restart(lost)
        pipeline.serve(with_layers(plan_of(tiny_llama, "abcd".replace(lost, ""), log=False), 1, 3, 5))
