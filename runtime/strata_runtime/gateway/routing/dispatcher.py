"""The dispatcher: takes requests, keeps them in the journal, and moves messages between it and the leaders.

One per gateway, on one event loop. `answers` opens generations, `control` sets routes, `app` reads its load. It decides
nothing about tokens (`journal`) or replicas (`routing`).
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterable, Sequence

import zmq.asyncio
from msgspec import structs

from strata_planner.contract.control import GATEWAY_PROTOCOL, GatewayStatus, SetRoute
from strata_planner.contract.frames import FAILURES, LeaderHello, Rejected, StepFailure, TokenEvent, Tokens, encode
from strata_runtime.gateway.errors import (
    ApiError,
    DeadlineError,
    InvalidRequestError,
    RequestFailedError,
    TooManyRequestsError,
    UnavailableError,
)
from strata_runtime.gateway.metrics import Counts, Load, Metrics
from strata_runtime.gateway.routing.generation import Generation, Put, RunningAnswer
from strata_runtime.gateway.routing.journal import GenerationRequest, Journal, Outgoing
from strata_runtime.gateway.routing.leader_link import LeaderLink
from strata_runtime.gateway.routing.pauses import Arrival, Pauses
from strata_runtime.gateway.routing.prefixes import Prefixes, chunks_of
from strata_runtime.gateway.routing.routing import ReplicaLoad, choose
from strata_runtime.gateway.routing.suspicion import MOST_FAILED_STEPS
from strata_runtime.gateway.settings import Limits
from strata_runtime.wire.transport import Keys

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 0.5
GATHER_SECONDS = 1.0  # how long the replays of an epoch wait for all its leaders, so that each gets its share

_NOTHING = (
    "no token can follow here: what this request asks for together (a form, min_tokens, bad_words, logit_bias) leaves none, or its "
    "form takes too long to follow: ask for less"
)


class Dispatcher:
    """Create it inside the event loop; `close` it there."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.incarnation = secrets.token_hex(8)
        self.changed = asyncio.Event()  # set when status or load may differ; the control server clears it
        self._limits = limits
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        self._journal = Journal()
        self._prefixes = Prefixes()
        self._pauses = Pauses()
        self._answers: dict[str, RunningAnswer] = {}
        self._route: SetRoute | None = None
        self._gathered_at = 0.0  # from then on replays wait for no further leader
        self._gathering = asyncio.get_running_loop().call_soon(int)
        self._links: dict[int, LeaderLink] = {}
        self._closing = False
        self._idle = asyncio.Event()  # set when the last answer ends
        self._housekeeper = asyncio.create_task(self._keep_house(), name="gateway housekeeping")
        self._ending: set[asyncio.Task[None]] = set()

    # What clients ask

    @property
    def is_closing(self) -> bool:
        """What fails now may go on elsewhere."""
        return self._closing

    def open(self, requests: Sequence[GenerationRequest], put: Put | None = None) -> Generation:
        """Start requests together, or none; their events go to `put`, or wait to be read. Raises UnavailableError without a route, TooManyRequestsError at the bound."""
        self.check_open()
        self._check_room(requests)
        for request in requests:
            encode(
                request.submit(request.id, request.begun, alone=False)
            )  # what cannot be sent never enters the journal
        generation = Generation(self.finish, requests, put)
        try:
            for index, request in enumerate(requests):
                replica = self._choose(request)
                self._answers[request.id] = RunningAnswer(generation, index, request)
                if replica is None:
                    self._mark_held([request.id])
                self._answers[request.id].ending = self._end_at(request)
                self._send(self._journal.submit(request, replica))
        except Exception:
            generation.close()
            raise
        self.changed.set()
        return generation

    def _check_room(self, requests: Sequence[GenerationRequest]) -> None:
        """A prompt beyond the bound on tokens is taken where nothing else runs."""
        bounds = {
            "answers": (len(self._journal), len(requests), self._limits.max_requests),
            "tokens of prompts": (
                self._journal.prompt_tokens(),
                sum(len(request.prompt) for request in requests),
                max(self._limits.max_prompt_tokens, 0 if len(self._journal) else self.max_tokens() * len(requests)),
            ),
        }
        for what, (held, asked, bound) in bounds.items():
            if held + asked > bound:
                raise TooManyRequestsError(
                    f"{held} {what} are running or waiting and this request asks for {asked}, "
                    f"the bound is {bound}: send it again later",
                    code="queue_full",
                )

    def check_open(self) -> None:
        """Raises UnavailableError when no request can be taken."""
        if self._route is None or self._closing:
            reason = "this gateway is shutting down" if self._closing else "no pipeline is ready for this model yet"
            raise UnavailableError(f"{reason}: send the request again in {UnavailableError.retry_after_seconds} s")

    def _end_at(self, request: GenerationRequest) -> asyncio.TimerHandle | None:
        """Nobody computes for a client whose deadline is over."""
        if request.deadline == math.inf:
            return None
        left = max(0.0, request.deadline - time.time())
        return asyncio.get_running_loop().call_later(left, self._deadline_over, request.id)

    def _deadline_over(self, request_id: str) -> None:
        tokens = self._answers[request_id].tokens
        reason = (
            f"the deadline of this request (deadline_seconds) is over with {tokens} tokens: allow more, or ask for less"
        )
        self._fail(request_id, DeadlineError(reason, code="deadline_exceeded"), "abort")

    def finish(self, request_id: str, reason: str) -> None:
        """Forget a request; its leader, if it still runs it, is told to stop."""
        if request_id in self._answers:
            self._send(self._journal.finish(request_id))
            self._forget(request_id, reason)

    def max_tokens(self) -> int:
        """Most tokens of a prompt and its answer together: what the plan and every connected leader allow."""
        planned = [] if self._route is None else [self._route.max_model_len]
        return min([*planned, *(hello.max_tokens for hello in self._hellos())], default=0)

    # What the controller asks

    @property
    def epoch(self) -> int:
        """That is routed to; 0: none."""
        return self._journal.epoch

    def set_route(self, route: SetRoute) -> None:
        """Switch to a newer epoch and replay what runs at replicas that do not go on. To the epoch in force leaders are added; an older one changes nothing.

        Raises InputError for an endpoint that is none; the route in force stays then.
        """
        if self._route is not None and route.epoch <= self._route.epoch:
            if route.epoch == self._route.epoch:
                self._add_leaders(self._route, route)
            return
        going_on = self._going_on(route)
        old = self._links
        self._links = going_on | self._linked(route, going_on)
        self._end(link for replica, link in old.items() if replica not in going_on)
        for leader in route.leaders:
            self._links[leader.replica].leader = leader
        self._route = route
        self._prefixes.forget_all_but(going_on)  # leaders of a new epoch have computed nothing yet
        self._gathered_at = time.monotonic() + GATHER_SECONDS
        self._gathering.cancel()
        self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._replay_held)
        formed = {leader.replica: leader.formed for leader in route.leaders if leader.formed}
        self._mark_held(self._journal.start_epoch(route.epoch, going_on.keys(), formed))
        self._pauses.start_epoch(route.epoch)
        log.info(
            "epoch %d: route to %d leader(s), %d requests under way",
            route.epoch,
            len(route.leaders),
            len(self._journal),
        )
        self.changed.set()

    def _add_leaders(self, known: SetRoute, route: SetRoute) -> None:
        """Of replicas that serve the epoch in force later than others did. Those that are known stay where they are."""
        leaders = tuple(leader for leader in route.leaders if leader.replica not in self._links)
        more = structs.replace(known, leaders=(*known.leaders, *leaders))
        if (route.key, route.max_model_len) != (known.key, known.max_model_len):
            log.error("epoch %d was set with another content: ignored, a new route needs a new epoch", route.epoch)
        elif leaders:
            self._links = self._links | self._linked(more, self._links)
            self._route = more
            self._journal.add_replicas({leader.replica: leader.formed for leader in leaders if leader.formed})
            log.info("epoch %d: route to %d leader(s)", route.epoch, len(more.leaders))
            self.changed.set()

    def _linked(self, route: SetRoute, known: Collection[int]) -> dict[int, LeaderLink]:
        """New links to the leaders of all replicas but those that are known."""
        made = dict[int, LeaderLink]()
        try:
            for leader in route.leaders:
                if leader.replica not in known:
                    keys = Keys.of(leader.key or route.key)
                    made[leader.replica] = LeaderLink(self._context, leader, leader.formed or route.epoch, keys, self)
        except Exception:
            self._end(made.values())
            raise
        return made

    def _going_on(self, route: SetRoute) -> dict[int, LeaderLink]:
        """The links of leaders that the new route has as they are: formed in the same epoch, in the same place."""
        return {
            leader.replica: self._links[leader.replica]
            for leader in route.leaders
            if leader.replica in self._links and self._links[leader.replica].reaches(leader)
        }

    def status(self) -> GatewayStatus:
        return GatewayStatus(
            incarnation=self.incarnation,
            epoch=self._journal.epoch,
            leaders_connected=len(self._hellos()),
            running_requests=len(self._journal),
            drafted=self._metrics.drafted,
            changes=self._pauses.told,
            replicas=tuple(sorted(self._links)),
            protocol=GATEWAY_PROTOCOL,
        )

    def load(self) -> Load:
        hellos = self._hellos()
        return Load(
            running=sum(hello.running for hello in hellos),
            waiting=sum(hello.waiting for hello in hellos) + len(self._journal.held()),
            kv_usage=max((hello.kv_usage for hello in hellos), default=0.0),
            epoch=self._journal.epoch,
            leaders_connected=len(hellos),
            leaders_missing=len(self._links) - len(hellos),
        )

    async def drain(self) -> None:
        """Take no new request; let running ones end for a while, then abort them."""
        self._closing = True
        self._idle.clear()
        if self._answers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._limits.drain_seconds)
        for request_id in list(self._answers):
            error = UnavailableError("this gateway is shutting down: send the request again")
            self._fail(request_id, error, "abort")

    async def close(self) -> None:
        self._housekeeper.cancel()
        self._gathering.cancel()
        self._end(self._links.values())
        await asyncio.gather(self._housekeeper, *self._ending, return_exceptions=True)
        self._context.term()

    # What leaders say (LinkOwner)

    def leader_connected(self, link: LeaderLink) -> None:
        if not self._is_current(link):
            return
        self._send(self._journal.welcome(link.leader.replica))
        self._replay_held()
        self._settle()
        self.changed.set()

    def leader_lost(self, link: LeaderLink, reason: str) -> None:
        if not self._is_current(link):
            return
        held = self._journal.hold(link.leader.replica)
        if held:
            log.warning("%d requests held: replica %d, %s", len(held), link.leader.replica, reason)
        self._mark_held(held)
        self._replay_held()
        self.changed.set()

    def leader_said(self, link: LeaderLink, message: Tokens | Rejected | StepFailure) -> None:
        if not self._is_current(link):
            return
        if isinstance(message, Rejected):
            self._rejected(link, message)
            return
        if isinstance(message, StepFailure):
            self._step_failed(link, message)
            return
        link.update(message)
        self.changed.set()
        delivery = self._journal.deliver(link.leader.replica, message)
        reached = {self._answers[request_id].generation for request_id, _ in delivery.events}
        for request_id, event in delivery.events:
            if request_id in self._answers:  # not one that an earlier event has ended with its call
                self._deliver(request_id, event)
        self._send(delivery.outgoing)
        self._settle()
        for generation in reached:  # after all: the journal counts every event of the message as delivered
            if generation.is_unread(self._limits.max_unread_events):
                generation.give_up(self._limits.max_unread_events)

    def leader_counted(self, more: Counts) -> None:
        self._metrics.counted(more)
        self.changed.set()

    def _is_current(self, link: LeaderLink) -> bool:
        """False for a link of an older epoch that is being closed."""
        return self._links.get(link.leader.replica) is link

    def _deliver(self, request_id: str, event: TokenEvent) -> None:
        if event.finish == "never":
            self._fail(request_id, InvalidRequestError(_NOTHING), "error")
            return
        if event.finish in FAILURES:
            message = "the pipeline could not finish this answer (its log has the reason): send the request again"
            self._fail(request_id, RequestFailedError(message), event.finish)
            return
        answer = self._answers[request_id]
        arrival = Arrival(time.monotonic(), time.time(), answer.known_tokens, event)
        if (pause := self._pauses.resume(request_id, arrival)) is not None:
            self._metrics.paused(pause)
        answer.observe(self._metrics, event.found)
        answer.generation.put(answer.index, event)
        if event.finish is not None:
            self._forget(request_id, event.finish)

    def _rejected(self, link: LeaderLink, rejected: Rejected) -> None:
        request_id = self._journal.reject(link.leader.replica, rejected)
        if request_id is not None:
            self._fail(request_id, InvalidRequestError(rejected.reason), "error")

    def _step_failed(self, link: LeaderLink, failure: StepFailure) -> None:
        """Those in the step are suspects: who was in too many ends, the others are tried again alone."""
        ended, outgoing = self._journal.step_failed(failure)
        self._mark_held(self._journal.held())
        for request_id in ended:
            reason = f"the pipeline failed {MOST_FAILED_STEPS} times at this request, the last time in {failure.reason}"
            self._fail(request_id, RequestFailedError(f"{reason}: report it, or send another"), "error")
        self._send(outgoing)
        link.lose(f"a step failed: {failure.reason}")
        self._replay_held()

    def _fail(self, request_id: str, error: ApiError, reason: str) -> None:
        answer = self._answers.get(request_id)
        if answer is None:  # its call has ended by the failure of another of its requests
            return
        if self._pauses.end(request_id, is_lost=True):
            self._metrics.lost()
        answer.generation.put(answer.index, error)
        self.finish(request_id, reason)

    def _forget(self, request_id: str, reason: str) -> None:
        answer = self._answers.pop(request_id)
        if answer.ending is not None:
            answer.ending.cancel()
        answer.finished(self._metrics, reason)
        self._pauses.end(request_id, is_lost=False)
        self._settle()
        self.changed.set()
        if not self._answers:
            self._idle.set()

    # Moving requests

    def _choose(self, request: GenerationRequest) -> int | None:
        chunks = chunks_of(request.prompt, request.salt) if len(self._links) > 1 else ()
        found = self._prefixes.found(chunks)
        replica = choose(
            ReplicaLoad(
                replica=replica,
                tokens_per_second=link.leader.tokens_per_second,
                outstanding=max(self._journal.assigned(replica), link.hello.running + link.hello.waiting),
                kv_usage=link.hello.kv_usage,
                found=found.get(replica, 0) / max(len(chunks), 1),
                whole=not link.hello.lost,
            )
            for replica, link in self._links.items()
            if link.hello is not None
        )
        if replica is not None:
            self._prefixes.sent(chunks, replica)
        return replica

    def _replay_held(self) -> None:
        """Hand what is held to leaders, as new requests are, those first whose clients wait longest; a request for which that fails ends alone."""
        if len(self._hellos()) < len(self._links) and time.monotonic() < self._gathered_at:
            return
        replays = self._journal.replays
        for request_id in sorted(self._journal.held(), key=lambda each: self._answers[each].waits_since):
            replica = self._choose(self._journal.request(request_id))
            if replica is None:
                break
            self._answers[request_id].held_since = None
            try:
                self._send(self._journal.replay(request_id, replica))
            except Exception as error:
                log.exception("request %s cannot be replayed", request_id)
                self._fail(request_id, RequestFailedError(f"this answer cannot go on: {error}; report it"), "error")
        self._metrics.replayed(self._journal.replays - replays)

    def _send(self, messages: Iterable[Outgoing]) -> None:
        """What cannot be sent is not lost: its link is given up, and the requests there are held."""
        for outgoing in messages:
            link = self._links[outgoing.replica]
            if not link.send(outgoing.message):
                asyncio.get_running_loop().call_soon(link.lose, "a message could not be sent")

    def _mark_held(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            answer = self._answers[request_id]
            answer.held_since = answer.held_since or time.monotonic()
            self._pauses.hold(request_id, answer.last_at or None)

    def _settle(self) -> None:
        """Tell what a change of epoch has cost, once it is over."""
        if self._pauses.settle(are_leaders_there=len(self._hellos()) == len(self._links)):
            self.changed.set()

    def _hellos(self) -> list[LeaderHello]:
        return [link.hello for link in self._links.values() if link.hello is not None]

    def _end(self, links: Iterable[LeaderLink]) -> None:
        for link in links:
            task = asyncio.create_task(link.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _keep_house(self) -> None:
        """Give up on requests that were held for too long."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            patience = self._limits.hold_seconds
            now = time.monotonic()
            for request_id, answer in list(self._answers.items()):
                if answer.held_since is not None and now - answer.held_since > patience:
                    message = f"no leader took this request within {patience:g} s (--hold-seconds): send it again later"
                    self._fail(request_id, UnavailableError(message), "abort")
