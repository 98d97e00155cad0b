"""The journal: every running request with its prompt and the tokens its client already has.

A pure state machine, driven by `dispatcher`; it knows neither sockets nor clocks. It keeps one law: whatever leaders,
epochs and links do, a client sees token 0, 1, 2, ... of one consistent answer, none twice and none skipped.

Each time a request is handed to a leader is an *attempt* with a name of its own on the wire. An answer to an older
attempt therefore names a request that is not known any more, even when the same leader sends it in the same epoch: its
tokens may have been drawn after a prefix that the client never saw (a replay may round differently).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from strata_planner.contract.frames import FAILURES, Abort, Rejected, Sampling, StepFailure, Submit, TokenEvent, Tokens
from strata_runtime.gateway.routing.suspicion import Record

ATTEMPT = "#"  # before the number of an attempt in its name on the wire; request ids have none


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer that a client waits for. `max_tokens` counts the whole answer."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    salt: str = ""
    deadline: float = math.inf  # seconds since 1970: what is done then is of no use
    patience: float = math.inf  # seconds since 1970: others that came later do not go first for ever
    begun: tuple[int, ...] = ()  # tokens of it that its client has from another gateway

    def submit(self, wire_id: str, delivered: Sequence[int], *, alone: bool) -> Submit:
        """What a leader is told of it."""
        return Submit(
            request=wire_id,
            prompt=list(self.prompt),
            delivered=list(delivered),
            max_tokens=self.max_tokens,
            stop_tokens=list(self.stop_tokens),
            sampling=self.sampling,
            alone=alone,
            priority=self.priority,
            salt=self.salt,
            deadline=min(self.deadline, self.patience),
        )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the leader of `replica`."""

    replica: int
    message: Submit | Abort


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a batch of token events comes to: (request id, event) for the clients, and messages for leaders."""

    events: list[tuple[str, TokenEvent]]
    outgoing: list[Outgoing]


@dataclass(slots=True)
class _Entry:
    request: GenerationRequest
    delivered: list[int] = field(default_factory=list)
    attempt: int = 0
    replica: int | None = None  # None: held, no leader has it
    record: Record = field(default_factory=Record)

    @property
    def wire_id(self) -> str:
        return self.request.id if self.attempt <= 1 else f"{self.request.id}{ATTEMPT}{self.attempt}"


class Journal:
    """Holds requests from `submit` until their last token, `reject` or `finish`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.replays = 0  # attempts beyond each request's first
        self._entries: dict[str, _Entry] = {}
        self._attempts: dict[str, _Entry] = {}  # by wire id, current attempts only
        self._orphans: dict[int, list[str]] = {}  # attempts that a lost replica may still run
        self._formed: dict[int, int] = {}  # replica -> the epoch in which it was formed, where that is not this one

    def __len__(self) -> int:
        return len(self._entries)

    def prompt_tokens(self) -> int:
        """Of all of them; choices of one request count each."""
        return sum(len(entry.request.prompt) for entry in self._entries.values())

    def request(self, request_id: str) -> GenerationRequest:
        return self._entries[request_id].request

    def held(self) -> list[str]:
        """Requests that no leader has, oldest first."""
        return [entry.request.id for entry in self._entries.values() if entry.replica is None]

    def assigned(self, replica: int) -> int:
        """How many requests the replica has from here."""
        return sum(entry.replica == replica for entry in self._entries.values())

    def submit(self, request: GenerationRequest, replica: int | None) -> list[Outgoing]:
        """Take a new request; `replica` None holds it until `replay`."""
        assert request.id not in self._entries, f"request {request.id} is already in the journal"
        entry = _Entry(request, list(request.begun))
        self._entries[request.id] = entry
        return [] if replica is None else self._attempt(entry, replica)

    def replay(self, request_id: str, replica: int) -> list[Outgoing]:
        """Hand a held request to a leader: prompt plus the tokens that the client has."""
        entry = self._entries[request_id]
        assert entry.replica is None, f"request {request_id} already runs on replica {entry.replica}"
        return self._attempt(entry, replica)

    def deliver(self, replica: int, tokens: Tokens) -> Delivery:
        """Sort a leader's events into those that clients get and those that are stale, repeated or too early."""
        delivery = Delivery([], [])
        if tokens.epoch != self._formed.get(replica, self.epoch):
            return delivery
        for event in tokens.events:
            entry = self._attempts.get(event.request)
            if entry is None or entry.replica != replica:
                continue
            if event.finish in FAILURES:
                self._forget(entry)
            elif event.index > len(entry.delivered):  # tokens were lost: the leader must go back
                delivery.outgoing.extend([Outgoing(replica, Abort(event.request)), *self._attempt(entry, replica)])
                continue
            elif event.index < len(entry.delivered):
                continue
            else:
                entry.delivered.append(event.token)
                entry.record = entry.record.progressed()
                if event.finish is not None:
                    self._forget(entry)
            delivery.events.append((entry.request.id, event))
        return delivery

    def reject(self, replica: int, rejected: Rejected) -> str | None:
        """The request that a leader refused; None when the refusal is stale."""
        entry = self._attempts.get(rejected.request)
        if entry is None or entry.replica != replica:
            return None
        self._forget(entry)
        return entry.request.id

    def step_failed(self, failure: StepFailure) -> tuple[list[str], list[Outgoing]]:
        """Note who was in a failed step. Returns the requests that have failed too often, and messages for leaders.

        A suspect that meanwhile runs in another place, in company, is taken back from there and held.
        """
        ended, outgoing = [], []
        for name in failure.requests:
            entry = self._entries.get(name.partition(ATTEMPT)[0])
            if entry is None:
                continue
            was_suspect = entry.record.is_suspect
            entry.record = entry.record.failed(failure.carried)
            if entry.record.is_over:
                ended.append(entry.request.id)
            elif entry.replica is not None and entry.wire_id != name and not was_suspect:
                outgoing.append(Outgoing(entry.replica, Abort(entry.wire_id)))
                self._release(entry)
        return ended, outgoing

    def finish(self, request_id: str) -> list[Outgoing]:
        """The client is gone or has enough. Finished requests are forgotten already: nothing happens."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        self._forget(entry)
        return [] if entry.replica is None else [Outgoing(entry.replica, Abort(entry.wire_id))]

    def hold(self, replica: int) -> list[str]:
        """The replica's leader is lost or forgetful: hold its requests. Returns those that are held now."""
        lost = [entry for entry in self._entries.values() if entry.replica == replica]
        for entry in lost:
            self._orphans.setdefault(replica, []).append(entry.wire_id)
            self._release(entry)
        return [entry.request.id for entry in lost]

    def welcome(self, replica: int) -> list[Outgoing]:
        """The replica answers again: it must stop what was taken from it meanwhile."""
        return [Outgoing(replica, Abort(wire_id)) for wire_id in self._orphans.pop(replica, [])]

    def start_epoch(
        self, epoch: int, going_on: Collection[int] = (), formed: Mapping[int, int] = MappingProxyType({})
    ) -> list[str]:
        """Leaders of a new epoch know no request: hold all but those of the replicas that go on. Returns those that were running.

        `formed`: of replicas that were formed in an earlier epoch that one, also of those that this journal has not known until now.
        """
        assert epoch > self.epoch, f"epoch {epoch} does not follow {self.epoch}"
        self._formed = dict(formed)
        self.epoch = epoch
        self._orphans = {replica: names for replica, names in self._orphans.items() if replica in going_on}
        running = [entry for entry in self._entries.values() if entry.replica not in (None, *going_on)]
        for entry in running:
            self._release(entry)
        return [entry.request.id for entry in running]

    def add_replicas(self, formed: Mapping[int, int]) -> None:
        """That join the epoch in force: of those formed in an earlier one that one."""
        self._formed |= formed

    def _attempt(self, entry: _Entry, replica: int) -> list[Outgoing]:
        self._release(entry)
        self.replays += entry.attempt > 0
        entry.attempt += 1
        entry.replica = replica
        self._attempts[entry.wire_id] = entry
        submit = entry.request.submit(entry.wire_id, entry.delivered, alone=entry.record.is_suspect)
        return [Outgoing(replica, submit)]

    def _release(self, entry: _Entry) -> None:
        self._attempts.pop(entry.wire_id, None)
        entry.replica = None

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.id]
        self._attempts.pop(entry.wire_id, None)
