"""What status says of guesses: how many were right under the wish that is in force, written when it is news."""

from strata_operator.api.status import SpeculationStatus
from strata_planner.contract.acceptance import DraftCounts, expected_tokens
from tests.operator.fakes import FakeGateway
from tests.operator.world import World

VERIFIED = 1000


def gateway(world: World) -> FakeGateway:
    pod = world.cluster.one("pods", "chat-gateway-x")
    assert pod is not None
    process = world.cluster.processes[pod["metadata"]["uid"]].speaks
    assert isinstance(process, FakeGateway)
    return process


def counts(acceptance: float, verifications: int = VERIFIED, tokens: int = 4) -> DraftCounts:
    """Of so many verifications of four drafts each."""
    right = round(verifications * (expected_tokens(acceptance, tokens) - 1))
    return DraftCounts(verifications, tokens * verifications, right, 2 * verifications)


def guessing(world: World, mode: str) -> None:
    world.edit(runtime={"speculation": {"mode": mode}})
    world.passes(60)
    assert world.status.phase == "Ready"


def told(world: World, drafted: DraftCounts) -> float | None:
    """Of what the gateway counts from now on."""
    gateway(world).drafted = drafted
    world.passes(20)
    assert world.status.speculation is not None
    return world.status.speculation.acceptance


def test_nothing_is_said_where_nothing_is_guessed(serving: World) -> None:
    gateway(serving).drafted = counts(0.5)
    serving.passes(20)
    assert serving.status.speculation is None


def test_what_was_counted_is_told_when_it_is_enough_and_again_when_it_is_news(serving: World) -> None:
    guessing(serving, "ngram")
    assert serving.status.speculation == SpeculationStatus(mode="ngram", tokens=4)
    assert told(serving, counts(0.5, 20)) is None
    assert told(serving, counts(0.5)) == 0.5
    writes = len(serving.cluster.wrote("PATCH", "/status"))
    assert told(serving, counts(0.53, 2 * VERIFIED)) == 0.5
    assert len(serving.cluster.wrote("PATCH", "/status")) == writes
    assert told(serving, counts(0.7, 3 * VERIFIED)) == 0.7


def test_what_was_counted_under_another_wish_says_nothing_of_this_one(serving: World) -> None:
    guessing(serving, "ngram")
    assert told(serving, counts(0.5)) == 0.5
    guessing(serving, "suffix")
    assert serving.status.speculation == SpeculationStatus(mode="suffix", tokens=4)
    assert told(serving, counts(0.5).plus(counts(0.8))) == 0.8
    guessing(serving, "none")
    assert serving.status.speculation is None


def test_what_is_told_outlives_gateway_and_operator(serving: World) -> None:
    guessing(serving, "ngram")
    assert told(serving, counts(0.5)) == 0.5
    serving.operator_starts_anew()
    assert told(serving, counts(0.5)) == 0.5
    assert told(serving, counts(0.5).plus(counts(0.8))) == 0.8, "since it was first heard"
    process = gateway(serving)
    process.incarnation, process.drafted = "another", None
    serving.passes(20)
    assert told(serving, counts(0.8, 10)) == 0.8
    assert told(serving, counts(0.3)) == 0.3
