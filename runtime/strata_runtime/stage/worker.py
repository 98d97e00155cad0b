"""Workers: the thread that runs one role between its sockets. Made by the slot at commit, ended with its epoch.

A follower takes a frame from the previous stage, computes, hands the result to the next. A leader also talks to gateways
and asks the engine for the next step whenever the pipeline has room. All sockets of an epoch live in one ZeroMQ context:
terminating it ends the worker wherever it waits.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import zmq
from msgspec import structs

from strata_planner.contract.decoding import decode_frame
from strata_planner.contract.frames import (
    DataMessage,
    FrameHeader,
    Handover,
    KvPages,
    StageLost,
    StepFailed,
    Survey,
    data_decoder,
    encode,
)
from strata_planner.contract.processors import ANYWHERE, Processors, bind
from strata_planner.contract.roles import Role
from strata_planner.contract.values import ContractError
from strata_runtime.errors import StepError
from strata_runtime.stage.bounds import FrameBounds
from strata_runtime.stage.executor import Answered, Passed, StageExecutor, Work
from strata_runtime.stage.handover import Mover, Side, with_given
from strata_runtime.stage.tensors import from_bytes, to_bytes

log = logging.getLogger(__name__)

LAST_WORD_MILLISECONDS = 1000
MOST_WORDS = 300  # characters of an error that clients are told


class Worker(Protocol):
    """What the slot needs of either kind."""

    executor: StageExecutor

    def run(self) -> None:
        """Serve until the context is terminated (zmq.ContextTerminated) or a step fails (StepError)."""


class Outlet:
    """The way to the next stage: of hidden states, or of the sampled tokens on the last one; beside either the states of watched layers."""

    def __init__(self, socket: zmq.Socket[Any], work: Work) -> None:
        self._socket = socket
        self._work = work

    def frame(self, passed: Passed) -> None:
        tensors = [to_bytes(each) for each in (passed.hidden, *passed.states)]
        self._work.sent_bytes += sum(each.nbytes for each in (passed.hidden, *passed.states))
        self._socket.send_multipart([encode(passed.header), *tensors], copy=False)

    def operations(self, header: FrameHeader) -> None:
        """Of a step without tokens."""
        self._socket.send_multipart([encode(header), b""], copy=False)

    def survey(self, survey: Survey) -> None:
        self._socket.send(encode(survey))

    def handover(self, handover: Handover) -> None:
        self._socket.send(encode(handover))

    def pages(self, pages: KvPages, tensors: Sequence[torch.Tensor]) -> None:
        self._socket.send_multipart([encode(pages), *map(to_bytes, tensors)], copy=False)

    def lost(self, lost: StageLost) -> None:
        self._socket.send(encode(lost))

    def result(self, answered: Answered) -> None:
        """With what the leader's head reads, if it has one."""
        self._socket.send_multipart([encode(answered.result), *map(to_bytes, answered.states)], copy=False)

    def failed(self, failure: StepFailed) -> None:
        """The last word of this stage: it goes out before the socket is closed, if the neighbour is there."""
        self._socket.linger = LAST_WORD_MILLISECONDS
        self._socket.send(encode(failure))

    def close(self) -> None:
        self._socket.close()


class Inlet:
    """The way from the previous stage; drops and counts what is of another epoch, refuses what its role can never get."""

    def __init__(self, socket: zmq.Socket[Any], epoch: int, executor: StageExecutor, bounds: FrameBounds) -> None:
        self.socket = socket
        self._epoch = epoch
        self._executor = executor
        self._bounds = bounds

    def receive(self) -> tuple[DataMessage, list[memoryview]] | None:
        """One message and its tensors' bytes; None for a dropped one. Raises StepError for one that is no frame."""
        work = self._executor.work
        work.waits = True
        header, *bodies = (part.buffer for part in self.socket.recv_multipart(copy=False))
        work.waits = False
        work.turns += 1
        try:
            message = decode_frame(data_decoder, header, self._bounds.header_bytes)
        except ContractError as error:
            raise StepError(f"the previous stage: {error}") from error
        if message.epoch != self._epoch:
            self._executor.work.frames_dropped += 1
            log.warning("dropped a frame of epoch %d; epoch %d is in force", message.epoch, self._epoch)
            return None
        self._bounds.check(message, [len(body) for body in bodies])
        return message, bodies

    def close(self) -> None:
        self.socket.close()


class Ways:
    """Of the pages that a stage hands over: to the stage behind it, and `back` to the one before."""

    def __init__(self, mover: Mover, outlet: Outlet, back: Outlet | None) -> None:
        """`back`: where it is another connection."""
        self.mover = mover
        self._sides: dict[Side, Outlet] = {"before": back or outlet, "behind": outlet}
        self._outlet, self._back = outlet, back

    def give(self, handover: Handover, role: Role) -> None:
        """All that this stage has for its neighbours, and the word on."""
        counts: dict[Side, int] = {"before": 0, "behind": 0}
        for side, pages, tensors in self.mover.give():
            self._sides[side].pages(pages, tensors)
            counts[side] += 1
        self._outlet.handover(structs.replace(handover, given=with_given(handover, role, counts)))

    def close(self) -> None:
        if self._back is not None:
            self._back.close()


class Links(NamedTuple):
    """Of one stage to its neighbours. `ways`: of pages; none: it hands none over, and gets none."""

    inlet: Inlet
    outlet: Outlet
    ways: Ways | None = None

    def close(self) -> None:
        self.inlet.close()
        self.outlet.close()
        if self.ways is not None:
            self.ways.close()


class Follower:
    """Runs every stage but the first."""

    def __init__(self, executor: StageExecutor, links: Links) -> None:
        self.executor = executor
        self._links = links
        self._inlet, self._outlet, self._ways = links

    def run(self) -> None:
        try:
            while True:
                received = self._inlet.receive()
                if received is not None:
                    self._step(*received)
        finally:
            self._links.close()

    def _step(self, header: DataMessage, bodies: list[memoryview]) -> None:
        if isinstance(header, StepFailed):  # of an earlier stage: on to the leader
            self._outlet.failed(header)
            return
        if isinstance(header, StageLost):  # behind this stage nothing may be lost
            self._outlet.lost(header)
            return
        if isinstance(header, (Handover, KvPages, Survey)):
            self._form(header, bodies)
            return
        if not isinstance(header, FrameHeader):
            raise StepError(f"stage {self.executor.role.stage} got a result, which only the leader takes")
        try:
            inputs, *states = (from_bytes(body, header.dtype, header.hidden) for body in bodies)
            output = self.executor.run(header, inputs, states)
        except Exception as error:
            self._outlet.failed(failure_of(header, self.executor.role.stage, error))
            raise
        if isinstance(output, Answered):
            self._outlet.result(output)
        elif output is not None:
            self._outlet.frame(output)
        elif not self.executor.role.head:
            self._outlet.operations(header)

    def _form(self, message: Handover | KvPages | Survey, bodies: list[memoryview]) -> None:
        """What goes round before the first step."""
        if self._ways is None:
            if isinstance(message, Survey):
                self._outlet.survey(self.executor.survey(message))
            elif isinstance(message, Handover):
                self._outlet.handover(message)
            return
        mover = self._ways.mover
        match message:
            case Handover():
                self._ways.give(message, self.executor.role)
                return
            case KvPages():
                mover.take(message, bodies)
            case Survey():
                mover.asked(message)
        if (answered := mover.answer()) is not None:
            self._outlet.survey(answered)


def failure_of(header: FrameHeader, stage: int, error: Exception) -> StepFailed:
    """What a stage says of a step that it could not compute. No sequence is suspected where the frame itself was wrong."""
    sequences = [] if isinstance(error, StepError) else [segment.sequence for segment in header.segments]
    return StepFailed(header.replica, header.epoch, header.step, sequences, f"stage {stage}: {_words(error)}")


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 3] + "..."


def serve(
    worker: Worker, name: str, failed: Callable[[str], None], processors: Processors = ANYWHERE
) -> threading.Thread:
    """Start the worker's thread, on these processors; `failed` hears why it ended unless its epoch was."""

    def body() -> None:
        bind(processors)
        try:
            worker.run()
        except zmq.ContextTerminated:
            return
        except Exception as error:  # whatever ends a step ends the epoch; the controller makes a new one
            log.exception("%s: a step failed", name)
            failed(f"{name}: {error}")

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
