"""The process of a rank other than the first: `main` with `--socket FD --segment FD --rank R --ranks N --threads T
[--collectives KIND] [--device cuda:1] [--processors 0,1]`, in a child of `slot.nursery`.

Asked for by `slot.other_ranks` of the slot whose stage it shares. It loads its part, then computes every step that the first rank is given, whose
sampling, sockets and requests it knows nothing of. Layers change their bits where the first rank's do: the order lies between two steps, and
what it needs is read beside them. It ends with the socket, so with its slot.
"""

import argparse
import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_args

import msgspec
import torch

from strata_planner.contract.frames import FrameHeader, data_decoder, encode
from strata_planner.contract.processors import ANYWHERE, bind, listed_processors
from strata_planner.contract.roles import Role
from strata_planner.contract.values import Value
from strata_runtime.allocator import set_up_heap
from strata_runtime.errors import reason_of
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.precision_switch import Change, Growth, read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.warmup import warm_up
from strata_runtime.logs import set_up_logs
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.kinds import CollectivesName, make_collectives
from strata_runtime.slot.forked import exit_with
from strata_runtime.slot.memory import private_bytes
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.slot.switching import moves_within
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.tensors import from_bytes, to_bytes

log = logging.getLogger(__name__)


class LoadPart(Value, frozen=True, tag=True):
    """Load this rank's part of a role from a folder; answered by `Loaded`."""

    role: Role
    folder: str
    verify: bool


class Join(Value, frozen=True, tag=True):
    """All ranks have loaded their parts: meet them. No answer; one that cannot ends."""


class Begin(Value, frozen=True, tag=True):
    """An epoch begins with this role, whose weights are those that are held: KV starts empty, steps are counted from 0. No answer."""

    role: Role


class CheckBits(Value, frozen=True, tag=True):
    """Whether these layers could have these bits; nothing is read. `number`: what the answer names."""

    number: int
    bits: dict[int, int]


class ReadBits(Value, frozen=True, tag=True):
    """Read all that makes a layer one of other bits, beside the steps."""

    number: int
    layer: int
    bits: int


class SwapBits(Value, frozen=True, tag=True):
    """The layer that was read has its new bits from the next step on. No answer."""


class DropBits(Value, frozen=True, tag=True):
    """What was read is not wanted. No answer."""


class Answer(Value, frozen=True):
    """`number`: of the order, 0 of `LoadPart`, LOADING while that gets on; `reason`: why it could not be obeyed, empty if it could; added, returned: of a layer that was read; idle: what the
    process held before it loaded its part.
    """

    number: int = 0
    reason: str = ""
    added_bytes: int = 0
    returned_bytes: int = 0
    idle_bytes: int = 0


LOADING = -1
LOADING_SECONDS = 5.0  # between two of them: they wait in the socket until the first rank has loaded its own part

Order = LoadPart | Join | Begin | CheckBits | ReadBits | SwapBits | DropBits
_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Answer)
_ORDER, _STEP = b"o", b"s"  # what a message begins with; a step is followed by its inputs


def send_order(connection: Connection, order: Order) -> None:
    connection.send_bytes(_ORDER + msgspec.msgpack.encode(order))


def send_step(connection: Connection, header: FrameHeader, inputs: torch.Tensor) -> None:
    connection.send_bytes(_STEP + encode(header))
    connection.send_bytes(to_bytes(inputs))


def receive_answer(connection: Connection) -> Answer:
    """Raises EOFError or OSError where the process has ended."""
    return _answers.decode(connection.recv_bytes())


class RankProcess:
    """Orders in, steps computed; what is computed goes to the other ranks within the step."""

    def __init__(self, connection: Connection, collectives: Collectives, device: torch.device) -> None:
        self._idle_bytes = private_bytes()
        self._connection = connection
        self._collectives = collectives
        self._device = device
        self._loaded: tuple[StageModel, PagedKvCache] | None = None
        self._executor: StageExecutor | None = None
        self._change: Change | None = None
        # As the slot's own thread for changes (see `slot.switching.Switches`): asked first, torch tells it this process' number of threads.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="set bits", initializer=torch.get_num_threads)

    def run(self) -> None:
        """Until the socket ends. A step that fails ends the waiting of all ranks, and the process."""
        try:
            while True:
                message = self._connection.recv_bytes()
                if message[:1] == _STEP:
                    self._step(message[1:])
                else:
                    self._obey(_orders.decode(message[1:]))
        except (EOFError, ConnectionError):
            log.info("the slot has no more use for rank %d", self._collectives.rank)
        finally:
            self._collectives.end()

    def _obey(self, order: Order) -> None:
        match order:
            case LoadPart():
                self._answer(0, lambda: self._load(order))
            case Join():
                self._collectives.join()
            case Begin(role):
                self._begin(role)
            case CheckBits(number, wanted):
                self._beside.submit(self._answer, number, lambda: self._check_bits(wanted))
            case ReadBits(number, layer, bits):
                self._beside.submit(self._answer, number, lambda: self._read_bits(layer, bits))
            case SwapBits():
                change, self._change = self._change, None
                assert change is not None, "a layer is to change of which nothing was read"
                self._running.switch(change)
                self._beside.submit(change.release)
            case DropBits():
                self._beside.submit(self._drop_bits)

    def _answer(self, number: int, obey: Callable[[], Growth | None]) -> None:
        """Obey, and say how that went."""
        try:
            growth = obey() or Growth()
            answer = Answer(number, "", growth.added_bytes, growth.returned_bytes, self._idle_bytes)
        except Exception as error:
            log.exception("rank %d cannot do what it was told", self._collectives.rank)
            answer = Answer(number, f"rank {self._collectives.rank}: {reason_of(error)}")
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the slot has ended; whoever reads from it sees that too
            self._connection.send_bytes(msgspec.msgpack.encode(answer))

    def _load(self, order: LoadPart) -> None:
        options = LoadOptions(keep=True, verify=order.verify, collectives=self._collectives)
        told = -math.inf

        def gets_on(*_: int) -> None:
            nonlocal told
            if (now := time.monotonic()) - told >= LOADING_SECONDS:
                told = now
                self._send(Answer(LOADING))

        model = load_stage(order.role, Path(order.folder), gets_on, self._device, options)
        self._loaded = model, cache_of(order.role, model)
        self._begin(order.role)

    def _begin(self, role: Role) -> None:
        assert self._loaded is not None, "an epoch begins before anything was loaded"
        model, cache = self._loaded
        model.speculation = role.speculation
        cache.reset()
        # The first rank samples.
        self._executor = StageExecutor(msgspec.structs.replace(role, head=False), model, cache)

    @property
    def _running(self) -> StageExecutor:
        assert self._executor is not None, "nothing was loaded"
        return self._executor

    def _check_bits(self, bits: dict[int, int]) -> None:
        moves_within(self._running.role, self._running.model, bits)

    def _read_bits(self, layer: int, bits: int) -> Growth:
        self._change = read_change(self._running.model, layer, bits)
        return self._change.growth

    def _drop_bits(self) -> None:
        if self._change is not None:
            self._change.release()
            self._change = None

    def _step(self, message: bytes) -> None:
        header = data_decoder.decode(message)
        assert isinstance(header, FrameHeader)
        executor = self._running
        body = bytearray(self._connection.recv_bytes())
        if not executor.role.embedding:
            inputs = from_bytes(body, header.dtype, header.hidden)
        else:
            inputs = torch.frombuffer(body, dtype=torch.int64) if body else torch.empty(0, dtype=torch.int64)
        executor.compute(header, inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="strata-rank", description="One of several ranks that share a stage.")
    for name in ("socket", "segment", "rank", "ranks", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--collectives", choices=get_args(CollectivesName), default="shared")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--processors", type=listed_processors, default=ANYWHERE)
    known = parser.parse_args(arguments)
    bind(known.processors)
    set_up_logs()
    set_up_heap()
    torch.set_num_threads(known.threads)
    warm_up()
    threading.Thread(target=_end_with, args=(known.socket,), daemon=True).start()
    collectives = make_collectives(known.collectives, known.segment, known.rank, known.ranks, known.device)
    RankProcess(Connection(known.socket), collectives, known.device).run()
    return 0


def _end_with(descriptor: int) -> None:
    """Whatever is under way: with the first rank gone, what the others compute is of no use, and they would wait for it."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    exit_with(main)
