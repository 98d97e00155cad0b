"""The process of a rank other than the first: `main` with `--socket FD --segment FD --rank R --ranks N --threads T`, in a fork of `slot.nursery`.

Asked for by `slot.other_ranks` of the slot whose stage it shares. It loads its part, then computes every step that the first rank is given, whose
sampling, sockets and requests it knows nothing of. It ends with the socket, so with its slot.
"""

import argparse
import logging
import os
import select
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from strata_planner.contract.frames import FrameHeader, data_decoder, encode
from strata_planner.contract.roles import Role
from strata_planner.contract.values import Value
from strata_runtime.allocator import set_up_heap
from strata_runtime.errors import reason_of
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.warmup import warm_up
from strata_runtime.logs import set_up_logs
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.tensors import from_bytes, to_bytes

log = logging.getLogger(__name__)


class LoadPart(Value, frozen=True, tag=True):
    """Load this rank's part of a role from a folder; answered by `Loaded`."""

    role: Role
    folder: str
    verify: bool


class Loaded(Value, frozen=True):
    """`reason`: why not, if it is not."""

    reason: str = ""


class Begin(Value, frozen=True, tag=True):
    """An epoch begins: KV starts empty, steps are counted from 0."""


Order = LoadPart | Begin
_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Loaded)
_ORDER, _STEP = b"o", b"s"  # what a message begins with; a step is followed by its inputs


def send_order(connection: Connection, order: Order) -> None:
    connection.send_bytes(_ORDER + msgspec.msgpack.encode(order))


def send_step(connection: Connection, header: FrameHeader, inputs: torch.Tensor) -> None:
    connection.send_bytes(_STEP + encode(header))
    connection.send_bytes(to_bytes(inputs))


def receive_answer(connection: Connection) -> Loaded:
    """Raises EOFError or OSError where the process has ended."""
    return _answers.decode(connection.recv_bytes())


class RankProcess:
    """Orders in, steps computed; what is computed goes to the other ranks within the step."""

    def __init__(self, connection: Connection, collectives: SharedMemory) -> None:
        self._connection = connection
        self._collectives = collectives
        self._loaded: tuple[Role, StageModel, PagedKvCache] | None = None
        self._executor: StageExecutor | None = None

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
                self._connection.send_bytes(msgspec.msgpack.encode(self._load(order)))
            case Begin():
                assert self._loaded is not None, "an epoch begins before anything was loaded"
                role, model, cache = self._loaded
                cache.reset()
                self._executor = StageExecutor(role, model, cache)

    def _load(self, order: LoadPart) -> Loaded:
        options = LoadOptions(verify=order.verify, collectives=self._collectives)
        try:
            model = load_stage(order.role, Path(order.folder), lambda *_: None, torch.device("cpu"), options)
            role = msgspec.structs.replace(order.role, head=False)  # the first rank samples
            self._loaded = (role, model, cache_of(order.role, model))
        except Exception as error:
            log.exception("rank %d cannot load its part", self._collectives.rank)
            return Loaded(f"rank {self._collectives.rank}: {reason_of(error)}")
        return Loaded()

    def _step(self, message: bytes) -> None:
        header = data_decoder.decode(message)
        assert isinstance(header, FrameHeader)
        assert self._executor is not None, "a step came before its epoch"
        body = bytearray(self._connection.recv_bytes())
        if not self._executor.role.embedding:
            inputs = from_bytes(body, header.dtype, header.hidden)
        else:
            inputs = torch.frombuffer(body, dtype=torch.int64) if body else torch.empty(0, dtype=torch.int64)
        self._executor.compute(header, inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="strata-rank", description="One of several ranks that share a stage.")
    for name in ("socket", "segment", "rank", "ranks", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    known = parser.parse_args(arguments)
    set_up_logs()
    set_up_heap()
    torch.set_num_threads(known.threads)
    warm_up()
    threading.Thread(target=_end_with, args=(known.socket,), daemon=True).start()
    RankProcess(Connection(known.socket), SharedMemory(known.segment, known.rank, known.ranks)).run()
    return 0


def _end_with(descriptor: int) -> None:
    """Whatever is under way: with the first rank gone, what the others compute is of no use, and they would wait for it."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    os._exit(0)
