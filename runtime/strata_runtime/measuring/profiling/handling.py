"""What a step takes a stage's process beside its executor: scheduling, messages, encryption, libzmq's own threads.

Used by `survey`. The workers of two stages run as a slot runs them, over loopback, with executors that compute nothing but read as much
memory as layers would, so that messages meet caches as cold as theirs. What is counted is processor time, which does not depend on what
other programs take of a machine; it includes the network thread of the client, which a slot does not have.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import zmq

from strata_planner.contract.control import Leader, SlotAddress
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import FrameHeader, SampledToken, StepResult, Survey
from strata_planner.contract.plan import MicroBatch
from strata_planner.contract.roles import Neighbour, Role
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.slot.gathering import Gathered
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.slot.reception import Gateways
from strata_runtime.stage.bounds import FrameBounds, largest_request
from strata_runtime.stage.executor import Answered, Passed, StageExecutor, Work
from strata_runtime.stage.inheritance import Inheritance
from strata_runtime.stage.worker import Follower, Inlet, Links, Outlet, Worker, serve
from strata_runtime.wire.client import LeaderClient, greedy
from strata_runtime.wire.transport import Keys, connect, listen

_STAGES = 2
_READ_BYTES = 64 << 20  # between two steps: more than most caches hold
_PAGE_TOKENS = 16
_MOST_TOKENS = 1 << 14  # of the KV that is not there
_VOCABULARY = 2  # tokens 0 and 1 alone pass
_KEY = "handling"


class Load(NamedTuple):
    """Requests that come at once, each with a prompt of `prompt` tokens and an answer of `answer`."""

    requests: int
    prompt: int
    answer: int


LOADS = (Load(1, 1, 48), Load(8, 1, 48), Load(32, 1, 32), Load(128, 1, 16), Load(8, 256, 1), Load(8, 512, 1))


class Handled(NamedTuple):
    """Processor seconds of one stage and step, the mean of both stages, and what their steps carried on average."""

    seconds: float
    sequences: float
    tokens: float


class _Idle(StageExecutor):
    """Answers every step as its stage would, at once. `counts`: steps, sequences, tokens; `own_seconds`: processor time inside."""

    def __init__(self, role: Role, hidden: int, dtype: torch.dtype) -> None:
        self.role = role
        self.work = Work()
        self.vocabulary = 2
        self.hidden = hidden
        self.own_seconds = 0.0
        self.counts = torch.zeros(3)
        self._hidden = (hidden, dtype)
        self._read = torch.ones(_READ_BYTES // 4)

    def run(
        self,
        header: FrameHeader,
        inputs: torch.Tensor,
        received: Sequence[torch.Tensor] = (),  # noqa: ARG002, nobody watches
    ) -> Passed | Answered | None:
        begun = time.thread_time()
        try:
            return self._answer(header, inputs.shape[0]) if header.segments else None
        finally:
            self.own_seconds += time.thread_time() - begun

    def survey(self, survey: Survey) -> Survey:
        """It has kept nothing."""
        return survey

    def _answer(self, header: FrameHeader, tokens: int) -> Passed | Answered:
        self.counts += torch.tensor([1.0, len(header.segments), tokens])
        self._read.sum()
        if not self.role.head:
            hidden, dtype = self._hidden
            return Passed(header, torch.zeros(tokens, hidden, dtype=dtype))
        sampled = [
            SampledToken(each.sequence, each.start + each.length - 1, 1, 0.0, [])
            for each in header.segments
            if each.sample
        ]
        return Answered(StepResult(header.replica, header.epoch, header.step, sampled))


class IdlePipeline:
    """A leader and a follower in threads of this process, and their client. `leader`, `key`: for a gateway."""

    def __init__(self, hidden: int, compute_type: ComputeType, most_step_tokens: int) -> None:
        dtype = COMPUTE_DTYPES[compute_type]
        self._executors = [
            _Idle(_role(stage, compute_type, most_step_tokens), hidden, dtype) for stage in range(_STAGES)
        ]
        self._keys = Keys.of(_KEY)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        bounds = [FrameBounds(each.role, hidden, _VOCABULARY) for each in self._executors]
        inward = [self._listening(zmq.PULL, each.largest_bytes) for each in bounds]
        requests, port = self._listening(zmq.ROUTER, largest_request(_MOST_TOKENS))
        links = []
        for stage, executor in enumerate(self._executors):
            outward = connect(self._context.socket(zmq.PUSH), _endpoint(inward[1 - stage][1]), self._keys)
            links.append(Links(Inlet(inward[stage][0], 1, executor, bounds[stage]), Outlet(outward, executor.work)))
        gathered = [Gathered(each, Inheritance(), ()) for each in self._executors]
        leader = LeaderWorker(self._executors[0], 1, Gateways(requests, 1, _KEY), links[0], gathered[0])
        workers: tuple[Worker, ...] = (leader, Follower(self._executors[1], links[1], gathered[1]))
        self._threads = [serve(each, f"idle stage {stage}", lambda _: None) for stage, each in enumerate(workers)]
        self.key = _KEY
        self.leader = Leader(0, "idle", _endpoint(port), 1.0)
        self._client = LeaderClient(SlotAddress("127.0.0.1", port, port, port), _KEY)
        self._client.hello()
        self._runs = 0

    def handle(self, load: Load) -> Handled:
        """Run the load to its end."""
        self._runs += 1
        names = [f"{self._runs}-{number}" for number in range(load.requests)]
        submits = [greedy(name, [0] * load.prompt, load.answer, salt=name) for name in names]
        counts, begun = self._counts, self._beside()
        self._client.generate(submits)
        seconds, (steps, sequences, tokens) = self._beside() - begun, (self._counts - counts).tolist()
        return Handled(seconds / steps, sequences / steps, tokens / steps)

    def close(self) -> None:
        self._client.close()
        self._context.term()
        for thread in self._threads:
            thread.join()

    @property
    def _counts(self) -> torch.Tensor:
        return torch.stack([each.counts for each in self._executors]).sum(0)

    def _beside(self) -> float:
        """Processor seconds of this process, less those of the executors and of the client."""
        return time.process_time() - time.thread_time() - sum(each.own_seconds for each in self._executors)

    def _listening(self, kind: int, largest_bytes: int) -> tuple[zmq.Socket[Any], int]:
        socket = self._context.socket(kind)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        listen(socket, "tcp://127.0.0.1:*", self._keys, largest_bytes)
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


@contextmanager
def idle_pipeline(hidden: int, compute_type: ComputeType, most_step_tokens: int) -> Iterator[IdlePipeline]:
    pipeline = IdlePipeline(hidden, compute_type, most_step_tokens)
    try:
        yield pipeline
    finally:
        pipeline.close()


def _endpoint(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def _role(stage: int, compute_type: ComputeType, most_step_tokens: int) -> Role:
    neighbour = Neighbour(slot="idle", role=0)
    pages = _MOST_TOKENS // _PAGE_TOKENS
    return Role(
        replica=0,
        stage=stage,
        stages=_STAGES,
        devices=(),
        tensor_parallel=1,
        leader=stage == 0,
        layers=(stage, stage),
        bits=(16,),
        format=("dense",),
        kv_bits=16,
        kv_page_budget=pages,
        replica_page_budget=pages,
        page_tokens=_PAGE_TOKENS,
        embedding=stage == 0,
        head=stage == _STAGES - 1,
        model_uri="",
        compute_type=compute_type,
        max_model_len=_MOST_TOKENS,
        micro_batch=MicroBatch(prefill=_MOST_TOKENS, decode=_MOST_TOKENS, max_step_tokens=most_step_tokens),
        predicted_bytes=0,
        next=neighbour,
        previous=neighbour,
    )
