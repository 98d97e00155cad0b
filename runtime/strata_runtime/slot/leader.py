"""The leader: the worker of stage 0. Gateways' requests go in, steps go down the pipeline, tokens come back.

Made by the slot at commit. The engine decides; this thread moves messages and runs stage 0's own layers.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch
import zmq
from msgspec import structs

from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import (
    Abort,
    Finish,
    FrameHeader,
    LeaderHello,
    Rejected,
    StageLost,
    StepFailed,
    StepResult,
    Submit,
    Survey,
)
from strata_planner.contract.moves import why_never
from strata_planner.contract.roles import Role
from strata_runtime.errors import RequestRefusedError, StepError
from strata_runtime.scheduler.draft_round import Drafted, DraftRound
from strata_runtime.scheduler.engine import Engine, Step
from strata_runtime.scheduler.scheduler import Limits
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.reception import Gateways, Gone
from strata_runtime.stage.executor import Answered, StageExecutor
from strata_runtime.stage.tensors import from_bytes
from strata_runtime.stage.worker import GLANCE_MILLISECONDS, Gathering, Inlet, Links, failure_of

log = logging.getLogger(__name__)

# Of requests that go on from an epoch before: gateways send them one behind the other, and the first step is to have them all.
TOGETHER_MILLISECONDS, TOGETHER_SECONDS = 1, 0.01


def limits_of(role: Role, vocabulary: int, drafter: Drafter | None = None) -> Limits:
    return Limits(
        under_way=role.micro_batch.under_way(role.stages),
        micro_batch=role.micro_batch,
        page_tokens=role.page_tokens,
        page_budget=role.replica_page_budget,
        max_model_len=role.max_model_len,
        vocabulary=vocabulary,
        sharing=role.prefix_caching,
        speculation=role.speculation,
        drafts=role.drafts,
        state_slots=role.state_slots,
        draft_positions=drafter.positions if drafter else 0,
        keeps_drafts=drafter is None or drafter.keeps_drafts,
    )


class _Guesses:
    """What a drafter guesses, as long as it can: guesses alone are lost where it fails, steps go on without it.

    Apart from the worker, which would hold itself by its engine: its weights would stay until a collection, beside those of the next epoch.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter

    def draft(self, tasks: DraftRound) -> Drafted:
        if self._drafter is not None:
            try:
                return self._drafter.draft(tasks)
            except Exception:
                log.exception("the draft model has failed: nothing is drafted until the next epoch")
                self._drafter = None
        return Drafted([[] for _ in tasks], 0.0)

    def expect(self, places: torch.Tensor | None) -> None:
        """Of a step that stage 0 has computed."""
        if self._drafter is not None and places is not None:
            self._drafter.guesser.expect(places)

    def take(self, states: Sequence[torch.Tensor]) -> None:
        """What came with the result of the oldest step under way."""
        if self._drafter is not None:
            self._drafter.guesser.take(states)


class LeaderWorker:
    """Stage 0 of a replica. Without other stages (`links` is None) it samples its own tokens. `drafter`: a small model that guesses them first."""

    def __init__(
        self,
        executor: StageExecutor,
        epoch: int,
        gateways: Gateways,
        links: Links | None,
        gathering: Gathering,
        drafter: Drafter | None = None,
    ) -> None:
        self.executor = executor
        self.is_done = False
        self.done: Callable[[], None] = lambda: None
        self._finishes = False  # it makes no more steps: the next epoch does
        self._holds = False  # likewise, before the stages have been told
        limits = limits_of(executor.role, executor.vocabulary, drafter)
        self._guesses = _Guesses(drafter)
        self.engine = Engine(limits, self._guesses.draft)
        self._keeps = not why_never(executor.role)  # stages learn what their blocks hold
        self._asks = self._keeps  # what they have kept: no step is made before all have said it
        self._begun = False
        self._failed = False  # a later stage could not compute a step: nothing goes on until the next epoch
        self._lost = ""  # a slot of a later stage that is not reached
        self._epoch = epoch
        self._hidden = executor.hidden
        self._dtype: ComputeType = executor.role.compute_type
        self._gateways = gateways
        self._links = links
        self._inlet = links.inlet if links else None
        self._outlet = links.outlet if links else None
        self._gathering = gathering
        self._poller = zmq.Poller()
        self._poller.register(gateways.socket, zmq.POLLIN)
        if self._inlet is not None:
            self._poller.register(self._inlet.socket, zmq.POLLIN)

    def run(self) -> None:
        stepped = False
        self._gateways.open(self._hello())
        try:
            self.ask()
            while True:
                self._receive(wait=not stepped)
                stepped = self._step()
        finally:
            self._gateways.close()
            if self._links is not None:
                self._links.close()

    def _receive(self, *, wait: bool) -> None:
        """Take in all that has come: results first, they free the pipeline."""
        if self._gathering.awaits and self._say():
            wait = False  # what came meanwhile can be computed now
        work = self.executor.work
        work.waits = wait
        ready = dict(self._poller.poll((GLANCE_MILLISECONDS if self._gathering.awaits else None) if wait else 0))
        work.waits = False
        work.turns += 1
        if self._inlet is not None and self._inlet.socket in ready:
            self._take_result(self._inlet)
        if self._gateways.socket in ready:
            until = time.monotonic() + TOGETHER_SECONDS
            while self._hear() and not self._begun and time.monotonic() < until:
                self._gateways.socket.poll(TOGETHER_MILLISECONDS)
        if not self._failed:
            self._gateways.hello = self._hello()

    def _hear(self) -> bool:
        """All that has come from gateways. Whether any of it goes on from an epoch before: more of that may be on its way."""
        goes_on = False
        for identity, message in self._gateways.received():
            self._answer(identity, message)
            goes_on = goes_on or (isinstance(message, Submit) and bool(message.delivered))
        return goes_on

    def _take_result(self, inlet: Inlet) -> None:
        received = inlet.receive()
        if received is None:
            return
        message, bodies = received
        match message:
            case StepResult() as result:
                self._deliver(Answered(result, [from_bytes(body, self._dtype, self._hidden) for body in bodies]))
            case StepFailed() as failure:
                self._fail(failure)
            case Survey() as survey:
                self._inherit(survey)
            case Finish(phase=phase):
                self._finish(phase)
            case StageLost(slot=slot, hangs=hangs):
                if hangs:
                    self._suspect(f"at slot {slot}", newest=False)
                self._lose(slot)
            case _:
                raise StepError("the leader got a frame of hidden states; only results come back to stage 0")

    def _answer(self, identity: bytes, message: Submit | Abort | Gone) -> None:
        match message:
            case Gone():
                for request in self._gateways.owned_by(identity):
                    self._gateways.disown(request)
                    self.engine.abort(request)
            case Abort(request):
                self._gateways.disown(request)
                self.engine.abort(request)
            case Submit():
                self._submit(identity, message)

    def _submit(self, identity: bytes, submit: Submit) -> None:
        try:
            self.engine.submit(submit)
        except RequestRefusedError as error:
            self._gateways.send(identity, Rejected(submit.request, str(error)))
        else:
            self._gateways.own(submit.request, identity)

    def _step(self) -> bool:
        """Run stage 0 on the engine's next step; False if there is none."""
        step = None if self._failed or self._asks or self._finishes or self._holds else self.engine.next_step()
        if step is None:
            return False
        self._begun = True
        header = self._header(step)
        try:
            output = self.executor.run(header, torch.tensor(step.token_ids, dtype=torch.int64))
        except Exception as error:
            self._fail(failure_of(header, self.executor.role.stage, error))
            raise
        if output is not None:
            self._guesses.expect(output.places)
        if isinstance(output, Answered):
            self._deliver(output)
        elif self._outlet is not None and output is not None:
            self._outlet.frame(output)
        elif self._outlet is not None:
            self._outlet.operations(header)
        return True

    def _header(self, step: Step) -> FrameHeader:
        replica = self.executor.role.replica
        return FrameHeader(
            replica,
            self._epoch,
            step.step,
            "",
            step.segments,
            step.operations,
            self._dtype,
            self._hidden,
            draft=step.draft,
            refill=step.refill,
            tokens=step.token_ids if self._keeps else [],
        )

    def ask(self) -> None:
        """Every stage what it has kept; whoever led before."""
        if not self._asks:
            return
        self._gathering.asked(Survey(self.executor.role.replica, self._epoch))
        self._say()

    def _say(self) -> bool:
        """What this stage has kept, once all pages are there that others have for it. Whether they are."""
        if (survey := self._gathering.answer()) is None:
            return False
        if self._outlet is None:
            self._inherit(survey)
        else:
            self._outlet.survey(survey)
        return True

    def _inherit(self, survey: Survey) -> None:
        if not self._asks:
            raise StepError("a survey came back that nobody has asked for")
        self._asks = False
        (first, end), blocks = survey.refill, survey.going_on
        if not blocks or end - first == survey.layers:
            return
        self.engine.inherit(blocks, survey.refill, survey.weights)
        log.info(
            "%d blocks of epoch %d: %d of %d layers are to be computed again",
            len(blocks),
            survey.formed,
            end - first,
            survey.layers,
        )

    def _deliver(self, answered: Answered) -> None:
        self._guesses.take(answered.states)
        events = self.engine.take(answered.result)
        if events:
            self._gateways.deliver(events, self._hello())

    def _fail(self, failure: StepFailed) -> None:
        """The epoch is over, and the gateways learn which requests were in the step."""
        self._failed = True
        self._gateways.fail(failure, self.engine.requests_of(failure.sequences))

    def _lose(self, slot: str) -> None:
        """Gateways send what is new to replicas that are whole; what runs here stays, for its keys and values do."""
        self._lost = self._lost or slot
        if not self._failed:
            self._gateways.tell(self._hello())

    def _finish(self, phase: str) -> None:
        """Asked for by any slot of the replica, more than once; what comes round as `last` has seen all steps and their results."""
        assert self._outlet is not None
        replica = self.executor.role.replica
        if phase == "asked" and not self._finishes:
            self._finishes = True
            self._outlet.finish(Finish(replica, self._epoch, "last"))
        elif phase == "last":
            self._outlet.finish(Finish(replica, self._epoch, "over"))
            self._gateways.finish(self._is_over)

    def hold(self) -> None:
        """No step is begun any more. Called by the slot: its word to finish waits behind a step and the results that came meanwhile."""
        self._holds = True

    def _is_over(self) -> None:
        """All tokens are on their way to gateways."""
        self.is_done = True
        self.done()

    def miss(self) -> None:
        """A step that has not come back for too long, with no word of who hangs: whose process hangs whole tells nobody. Called by the slot."""
        self._suspect("at a later stage", newest=False)

    def _suspect(self, where: str, *, newest: bool) -> None:
        """Gateways learn who was in a step that does not end, as in one that failed. The oldest has not come back from a later stage; the newest is this stage's."""
        requests = self.engine.requests_under_way(newest=newest)
        if requests and not self._failed:
            self._gateways.suspect(requests, f"a step that does not end {where}")

    @property
    def awaited(self) -> int | None:
        """The oldest step that has not come back from the stages behind, -1 of what they have kept; None: nothing that could. Read from any thread."""
        if self._links is None or self._failed or self._lost:
            return None
        return -1 if self._asks else self.engine.oldest

    def hang(self, slot: str) -> None:
        """Of this stage itself: its worker can tell nobody, so the thread that meets gateways does. Called by the slot."""
        self._suspect(f"at slot {slot}", newest=True)
        self._lost = self._lost or slot
        if (hello := self._gateways.hello) is not None:
            self._gateways.hello = structs.replace(hello, lost=slot)

    def _hello(self) -> LeaderHello:
        engine, drafts = self.engine, self.engine.scheduler.speculation.counts
        return LeaderHello(
            self.executor.role.replica,
            self._epoch,
            self._gateways.incarnation,
            engine.scheduler.limits.most_tokens,
            engine.running,
            engine.waiting,
            engine.kv_usage,
            engine.scheduler.preemptions,
            drafts.drafts,
            drafts.draft_tokens,
            drafts.accepted_tokens,
            self._lost,
        )
