"""The journal's law: whatever leaders, epochs and links do, a client sees one consistent answer, in order, once."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata_planner.contract.frames import Abort, Rejected, Sampling, Submit, TokenEvent, Tokens
from strata_runtime.gateway.routing.journal import GenerationRequest, Journal, Outgoing
from tests.laws import share

REPLICAS = (0, 1)
MAX_TOKENS = 6
maybe_a_replica = st.sampled_from([None, *REPLICAS])


def a_request(name: str = "r", max_tokens: int = MAX_TOKENS) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), max_tokens, (), Sampling())


def tokens(epoch: int, *events: TokenEvent) -> Tokens:
    return Tokens(replica=0, epoch=epoch, events=list(events), running=0, waiting=0, kv_usage=0.0)


def event(request: str, index: int, token: int = 7, finish: str | None = None) -> TokenEvent:
    return TokenEvent(request, index, token, 0.0, [], finish)


class JournalMachine(RuleBasedStateMachine):
    """Leaders that never draw the same token twice, over links that delay, repeat and lose what they carry.

    Each token remembers the prefix it was drawn after. If the client's answer is ever anything but the prefix that
    the next token was drawn after, a token was skipped, repeated, or taken from an answer that the client never saw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.drawn = 0
        self.origin: dict[int, tuple[int, ...]] = {}
        self.running: dict[int, dict[str, list[int]]] = {replica: {} for replica in REPLICAS}
        self.wire: dict[int, deque[Tokens]] = {replica: deque() for replica in REPLICAS}
        self.client: dict[str, list[int]] = {}
        self.done: set[str] = set()
        self.names = 0
        self.formed: dict[int, int] = {}
        self.start_epoch(replay_at=None, going_on=frozenset())
        for replica in (*REPLICAS, None):
            self.submit(replica)

    @rule(replay_at=maybe_a_replica, going_on=st.frozensets(st.sampled_from(REPLICAS)))
    def start_epoch(self, replay_at: int | None, going_on: frozenset[int]) -> None:
        held = set(self.journal.held())
        there = {name: replica for replica in going_on for name in self.on(replica)}
        formed = {replica: self.formed[replica] for replica in going_on}
        now_held = set(self.journal.start_epoch(self.journal.epoch + 1, going_on, formed))
        assert set(self.journal.held()) == held | now_held
        assert not now_held & there.keys()
        for replica in set(REPLICAS) - going_on:
            self.running[replica].clear()  # what is on the wire may still arrive
            self.formed[replica] = self.journal.epoch
        self.replay(replay_at)

    def on(self, replica: int) -> set[str]:
        """Requests that the replica has from here."""
        return {name for name in self.client if (entry := self.journal._entries.get(name)) and entry.replica == replica}

    @rule(replica=maybe_a_replica)
    def submit(self, replica: int | None) -> None:
        self.names += 1
        self.client[f"r{self.names}"] = []
        self.carry(self.journal.submit(a_request(f"r{self.names}"), replica), lose=False)

    @rule(replica=maybe_a_replica, lose=st.booleans())
    def replay(self, replica: int | None, *, lose: bool = False) -> None:
        for name in self.journal.held() if replica is not None else []:
            self.carry(self.journal.replay(name, replica), lose=lose)

    @rule(replica=st.sampled_from(REPLICAS))
    def step(self, replica: int) -> None:
        """The leader draws a token for all it runs."""
        events = []
        for name, prefix in list(self.running[replica].items()):
            self.drawn += 1
            self.origin[self.drawn] = tuple(prefix)
            last = len(prefix) + 1 == MAX_TOKENS
            events.append(event(name, len(prefix), self.drawn, "length" if last else None))
            prefix.append(self.drawn)
            if last:
                del self.running[replica][name]
        self.wire[replica].append(tokens(self.formed[replica], *events))

    @rule(replica=st.sampled_from(REPLICAS), again=st.booleans(), newest=st.booleans())
    def arrive(self, replica: int, *, again: bool, newest: bool) -> None:
        wire = self.wire[replica]
        if not wire:
            return
        message = wire[-1] if newest else wire[0]  # out of order as well
        if not again:
            wire.remove(message)
        delivery = self.journal.deliver(replica, message)
        for name, received in delivery.events:
            assert self.origin[received.token] == tuple(self.client[name])
            self.client[name].append(received.token)
            if received.finish:
                self.done.add(name)
        self.carry(delivery.outgoing, lose=False)

    @rule(replica=st.sampled_from(REPLICAS))
    def lose_newest(self, replica: int) -> None:
        if self.wire[replica]:
            self.wire[replica].pop()

    @rule(replica=st.sampled_from(REPLICAS), crashed=st.booleans(), replay_at=maybe_a_replica)
    def lose_leader(self, replica: int, replay_at: int | None, *, crashed: bool) -> None:
        """The link breaks; the leader may be gone or only out of sight."""
        self.journal.hold(replica)
        if crashed:
            self.running[replica].clear()
        self.replay(replay_at)

    @rule(replica=st.sampled_from(REPLICAS))
    def welcome(self, replica: int) -> None:
        self.carry(self.journal.welcome(replica), lose=False)

    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        if self.client:
            name = data.draw(st.sampled_from(sorted(self.client)))
            self.done.add(name)
            self.carry(self.journal.finish(name), lose=False)
            assert self.journal.finish(name) == []

    @invariant()
    def forgets_what_is_done(self) -> None:
        assert len(self.journal) == len(self.client) - len(self.done)

    def carry(self, messages: list[Outgoing], *, lose: bool) -> None:
        for outgoing in messages:
            running = self.running[outgoing.replica]
            match outgoing.message:
                case Submit() as submit if not lose:
                    assert submit.request not in running, "an attempt's name is its own"
                    running[submit.request] = list(submit.delivered)
                case Abort(name):
                    running.pop(name, None)

    def teardown(self) -> None:
        """Once nothing fails any more, every answer completes."""
        self.start_epoch(replay_at=0, going_on=frozenset())
        for _ in range(MAX_TOKENS):
            self.step(0)
        while self.wire[0]:
            self.arrive(0, again=False, newest=False)
        assert len(self.journal) == 0
        assert all(len(answer) == MAX_TOKENS for name, answer in self.client.items() if name not in self.done)


TestJournalLaw = JournalMachine.TestCase
TestJournalLaw.settings = settings(max_examples=share(150), stateful_step_count=40, deadline=None)


@pytest.fixture
def journal() -> Journal:
    journal = Journal()
    journal.start_epoch(1)
    journal.submit(a_request(), replica=0)
    return journal


def test_a_gap_sends_the_leader_back_to_what_the_client_has(journal: Journal) -> None:
    journal.deliver(0, tokens(1, event("r", 0)))
    delivery = journal.deliver(0, tokens(1, event("r", 2), event("r", 3)))
    assert delivery.events == []
    abort, submit = (outgoing.message for outgoing in delivery.outgoing)
    assert abort == Abort("r")
    assert isinstance(submit, Submit)
    assert (submit.request, submit.delivered, submit.max_tokens) == ("r#2", [7], MAX_TOKENS)
    assert journal.replays == 1


@pytest.mark.parametrize(
    ("replica", "stale"),
    [
        pytest.param(0, tokens(2, event("r", 0)), id="of another epoch"),
        pytest.param(1, tokens(1, event("r", 0)), id="of a replica that does not have it"),
        pytest.param(0, tokens(1, event("x", 0)), id="of an unknown request"),
    ],
)
def test_stale_events_are_dropped(journal: Journal, replica: int, stale: Tokens) -> None:
    delivery = journal.deliver(replica, stale)
    assert (delivery.events, delivery.outgoing) == ([], [])


def test_a_failure_ends_a_request_whatever_its_index(journal: Journal) -> None:
    delivery = journal.deliver(0, tokens(1, event("r", 5, finish="error")))
    assert [name for name, _ in delivery.events] == ["r"]
    assert len(journal) == 0


def test_a_returning_replica_stops_what_was_taken_from_it(journal: Journal) -> None:
    assert journal.hold(0) == ["r"]
    assert journal.held() == ["r"]
    journal.replay("r", replica=1)
    assert journal.welcome(0) == [Outgoing(0, Abort("r"))]
    assert journal.welcome(0) == []
    assert (journal.assigned(0), journal.assigned(1)) == (0, 1)


def test_only_the_current_attempt_can_be_rejected(journal: Journal) -> None:
    journal.hold(0)
    journal.replay("r", replica=0)
    assert journal.reject(0, Rejected("r", "too long")) is None
    assert journal.reject(0, Rejected("r#2", "too long")) == "r"
    assert len(journal) == 0
