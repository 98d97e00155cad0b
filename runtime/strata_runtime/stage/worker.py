"""Workers: the thread that runs one role between its sockets. Made by the slot at commit, ended with its epoch.

A follower takes a frame from the previous stage, computes, hands the result to the next. A leader also talks to gateways
and asks the engine for the next step whenever the pipeline has room. All sockets of an epoch live in one ZeroMQ context:
terminating it ends the worker wherever it waits.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import zmq

from strata_planner.contract.decoding import decode_frame
from strata_planner.contract.frames import (
    DataMessage,
    Finish,
    FrameHeader,
    StageLost,
    StepFailed,
    Survey,
    data_decoder,
    encode,
)
from strata_planner.contract.processors import ANYWHERE, Processors, bind
from strata_planner.contract.values import ContractError
from strata_runtime.errors import StepError
from strata_runtime.stage.bounds import FrameBounds
from strata_runtime.stage.executor import Answered, Passed, StageExecutor, Work
from strata_runtime.stage.tensors import from_bytes, to_bytes

log = logging.getLogger(__name__)

LAST_WORD_MILLISECONDS = 1000
LAST_STEP_MILLISECONDS = 20  # nobody has failed: the neighbour reads, unless it has ended first
GLANCE_MILLISECONDS = 2  # at pages that are awaited
MOST_WORDS = 300  # characters of an error that clients are told


class Worker(Protocol):
    """What the slot needs of either kind."""

    executor: StageExecutor
    is_done: bool  # nothing more comes of its epoch: it may end
    done: Callable[[], None]  # called then, from any thread

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

    def lost(self, lost: StageLost) -> None:
        self._socket.send(encode(lost))

    def result(self, answered: Answered) -> None:
        """With what the leader's head reads, if it has one."""
        self._socket.send_multipart([encode(answered.result), *map(to_bytes, answered.states)], copy=False)

    def finish(self, finish: Finish) -> None:
        """What is said last goes out before the socket is closed, if the neighbour is there. What was said before it has been heard: closing waits for nothing then,
        where the neighbour is in its next epoch already and a new connection has no way in.
        """
        self._socket.linger = LAST_STEP_MILLISECONDS if finish.phase == "over" else 0
        self._socket.send(encode(finish))

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


class Gathering(Protocol):
    """Pages that other slots have for a stage: it computes nothing before they are there, or are awaited no more."""

    def asked(self, survey: Survey) -> None:
        """What the stage has kept; answered when all is there."""

    def answer(self) -> Survey | None:
        """To the survey that waits, if it can be answered now."""

    @property
    def awaits(self) -> bool:
        """Whether a survey waits for pages: who waits for messages looks now and then."""


class Links(NamedTuple):
    """Of one stage to its neighbours."""

    inlet: Inlet
    outlet: Outlet

    def close(self) -> None:
        self.inlet.close()
        self.outlet.close()


class Follower:
    """Runs every stage but the first."""

    def __init__(self, executor: StageExecutor, links: Links, gathering: Gathering) -> None:
        self.executor = executor
        self.is_done = False
        self.done: Callable[[], None] = lambda: None
        self._links = links
        self._inlet, self._outlet = links
        self._gathering = gathering

    def run(self) -> None:
        try:
            while True:
                while self._gathering.awaits and not self._inlet.socket.poll(GLANCE_MILLISECONDS):
                    self.executor.work.turns += 1  # it waits for others, for a while of their own
                    self._answer()
                received = self._inlet.receive()
                if received is not None:
                    self._step(*received)
        finally:
            self._links.close()

    def _step(self, header: DataMessage, bodies: list[memoryview]) -> None:
        if isinstance(header, StepFailed | StageLost | Finish):
            self._pass_on(header)
            return
        if isinstance(header, Survey):
            self._gathering.asked(header)
            self._answer()
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

    def _pass_on(self, message: StepFailed | StageLost | Finish) -> None:
        """What is for the leader, or comes from it."""
        match message:
            case StepFailed():  # of an earlier stage
                self._outlet.failed(message)
            case StageLost():  # behind this stage nothing may be lost
                self._outlet.lost(message)
            case Finish(phase="over"):
                if not self.executor.role.head:  # the leader has said it, and may be gone
                    self._outlet.finish(message)
                self.is_done = True
                self.done()
            case Finish():
                self._outlet.finish(message)

    def _answer(self) -> None:
        if (answered := self._gathering.answer()) is not None:
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
