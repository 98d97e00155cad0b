"""Epochs per replica with real slots: what the controller decides of two replicas, and what their slots make of it."""

from pathlib import Path

import pytest

from strata_operator.decide.epochs import CreateEpoch, Ledger, Observed, RecordCommit, SendToSlot, next_steps
from strata_operator.render.epoch import Epoch
from strata_planner.contract.control import Commit, GetStatus, Prepare, SlotStatus
from strata_planner.contract.frames import LeaderHello, TokenEvent
from strata_planner.contract.keys import request_secret
from strata_planner.contract.plan import Plan
from strata_runtime.wire.client import LeaderClient, greedy
from tests.operator.fakes import replicas_of
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

SLOTS = ("a", "b", "c", "d")
PROMPT = [3] * 34
ANSWER = 40


class Controlled(PipelineHarness):
    """Real slots, driven by the controller's decisions alone."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(SLOTS)
        self.plan = plan
        self.ledger = Ledger()

    def seen(self) -> Observed:
        statuses = {name: slot.ask(GetStatus()) for name, slot in self.slots.items()}
        return Observed(statuses, {}, {name: slot.address for name, slot in self.slots.items()})

    def settle(self) -> dict[str, SlotStatus]:
        while True:
            seen = self.seen()
            steps = next_steps(self.plan, self.ledger, seen)
            newest = self.ledger.newest
            if not steps and newest and all(each.committed_epoch == newest.number for each in seen.slots.values()):
                return dict(seen.slots)
            for step in steps:
                match step:
                    case CreateEpoch():
                        epoch = Epoch(step.number, f"key {step.number}", step.plan, step.formations)
                        self.ledger = self.ledger.with_newest(epoch)
                    case RecordCommit():
                        self.ledger = self.ledger.with_commit(step.number)
                    case SendToSlot():
                        self.slots[step.slot].ask(step.message)

    def leader(self, slot: str, replica: int) -> LeaderClient:
        """As the gateway reaches it now."""
        assert self.ledger.newest is not None
        client = LeaderClient(self.slots[slot].address, request_secret(self.ledger.newest.key_of(replica)), 0)
        self._leaders.append(client)
        assert client.hello().epoch == self.ledger.newest.formed_in(replica)
        return client


@pytest.fixture
def two(shallow_llama: Path) -> Plan:
    return replicas_of(even_plan(shallow_llama, ["a", "b"]), even_plan(shallow_llama, ["c", "d"]))


def index_of(events: list[TokenEvent]) -> list[int]:
    return [event.index for event in events]


def test_a_lost_slot_leaves_streams_keys_and_cache_of_the_other_replica(two: Plan) -> None:
    with Controlled(two) as slots:
        slots.settle()
        expected = slots.leader("c", 1).generate([greedy("r", PROMPT, ANSWER)])["r"]
        streaming, lost = slots.leader("c", 1), slots.leader("a", 0)
        streaming.send(greedy("s", PROMPT, ANSWER))
        begun = streaming.events()
        assert index_of(begun) == [0]
        assert begun[0].found >= 32  # of the request before, by the cache
        before = slots.slots["c"].ask(GetStatus())
        slots.restart("b")
        after = slots.settle()
        assert {each.committed_epoch for each in after.values()} == {2}
        assert {(name, each.roles[0].formed) for name, each in after.items()} == {
            ("a", 2),
            ("b", 2),
            ("c", 1),
            ("d", 1),
        }
        assert after["c"].roles[0].steps >= before.roles[0].steps > 0
        rest = streaming.collect(["s"])["s"]
        assert [event.token for event in begun] + rest == expected
        again = slots.leader("c", 1)
        again.send(greedy("t", PROMPT, 2))
        assert again.events()[0].found >= 32  # its cache is there
        while lost.heard(0):
            assert isinstance(lost.receive(), LeaderHello), "it may say that a stage is lost, but no tokens"
        assert slots.leader("a", 0).generate([greedy("r", PROMPT, ANSWER)])["r"] == expected
        assert not heard_with_the_key_of_before(slots)


def heard_with_the_key_of_before(slots: Controlled) -> bool:
    """Whether who knows only the key of the epoch in which replica 0 was formed first reaches its leader now."""
    stranger = LeaderClient(slots.slots["a"].address, request_secret("key 1"), 0)
    try:
        stranger.send(greedy("z", PROMPT, 1))
        return stranger.heard(0.3)
    finally:
        stranger.close()


def test_a_slot_does_not_prepare_what_is_to_go_on_and_does_not_run(two: Plan) -> None:
    with Controlled(two) as slots:
        slots.settle()
        told: list[Prepare] = []
        thread = slots.threads["c"]
        ask = thread.ask
        thread.ask = lambda message: (told.append(message) if isinstance(message, Prepare) else None, ask(message))[1]  # type: ignore[method-assign,func-returns-value]
        slots.restart("b")
        slots.settle()
        (prepare,) = told
        assert prepare.formed == (1,)
        slots.restart("c")
        status = slots.slots["c"].ask(prepare)
        assert (status.prepare.epoch, status.committed_epoch) == (0, 0)
        assert slots.slots["c"].ask(Commit(epoch=2)).committed_epoch == 0
        after = slots.settle()
        assert {(name, each.roles[0].formed) for name, each in after.items()} == {
            ("a", 2),
            ("b", 2),
            ("c", 3),
            ("d", 3),
        }


def test_a_slot_of_two_replicas_goes_on_with_one_of_them(shallow_llama: Path) -> None:
    plan = replicas_of(
        even_plan(shallow_llama, ["a", "b"]), even_plan(shallow_llama, ["b", "c"]), even_plan(shallow_llama, ["d"])
    )
    with Controlled(plan) as slots:
        slots.settle()
        running = slots.threads["b"].slot._running
        assert running is not None
        kept = running.roles[1]
        slots.restart("a")
        after = slots.settle()
        running = slots.threads["b"].slot._running
        assert running is not None
        assert [(each.replica, each.formed) for each in after["b"].roles] == [(0, 2), (1, 1)]
        assert running.roles[1] is kept
        assert running.roles[1].worker.executor.work.steps == kept.worker.executor.work.steps
        assert after["b"].lost_peers == ()
