"""The other ranks of a stage, as its first one has them: processes that load their parts and compute every step with it.

Made by the slot's prepare for a role of several devices, told of epochs by `RunningEpoch` and of steps by the stage executor. On processors a device
is some cores of the slot's node, on GPUs one of those that the slot has; a rank is one process on it.
"""

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from strata_planner.contract.devices import is_processor
from strata_planner.contract.frames import FrameHeader
from strata_planner.contract.processors import Processors
from strata_planner.contract.roles import Role
from strata_planner.contract.shares import problem_of
from strata_runtime.errors import InputError
from strata_runtime.loading.precision_switch import Growth
from strata_runtime.ranks.collectives import Collectives, RankLostError
from strata_runtime.ranks.kinds import CollectivesName, kind_for, make_collectives, make_file
from strata_runtime.slot.binding import UNBOUND, Binding, device_of
from strata_runtime.slot.memory import private_bytes
from strata_runtime.slot.nursery import RankHandle, the_nursery
from strata_runtime.slot.rank_process import (
    LOADING,
    Answer,
    Begin,
    CheckBits,
    DropBits,
    Join,
    LoadPart,
    Order,
    ReadBits,
    SwapBits,
    receive_answer,
    send_order,
    send_step,
)

log = logging.getLogger(__name__)

_groups: "weakref.WeakSet[OtherRanks]" = weakref.WeakSet()
_idle: dict[int, int] = {}  # process id of each rank that has loaded its part -> what it held before
WAIT_SECONDS = 0.25  # for parts that are being loaded, between two looks at whether they are still wanted


def check_ranks(role: Role) -> None:
    """Before anything is loaded. Raises InputError for a role whose devices this slot cannot use together."""
    if len(role.devices) != role.tensor_parallel:
        raise InputError(
            f"tensorParallel {role.tensor_parallel} with {len(role.devices)} devices: a rank has one device; plan again"
        )
    if problem := problem_of(role.shares, role.tensor_parallel):
        raise InputError(f"{problem}; plan again")
    if role.rank_bytes and len(role.rank_bytes) != len(role.shares):
        raise InputError(
            f"rankBytes of {len(role.rank_bytes)} devices and {len(role.shares)} shares: one of each for a device; plan again"
        )
    _check_devices(role)
    if role.leader and role.speculation.has_head:
        raise InputError(
            f"a head of EAGLE-3 beside a stage over {role.tensor_parallel} devices: it reads the whole embedding, of which ranks have parts; use "
            "speculation ngram, suffix, draft or selfPrecision, or tensorParallel [1]"
        )


def _check_devices(role: Role) -> None:
    types = sorted({device.type for device in role.devices})
    if all(map(is_processor, types)):
        return
    if len(types) > 1:
        raise InputError(f"a stage over {' and '.join(types)}: its devices must be of one type; plan again")
    seen = torch.cuda.device_count()
    numbers = [device.index for device in role.devices]
    if len(set(numbers)) < len(numbers) or max(numbers) >= seen:
        raise InputError(
            f"a stage over the {types[0]} {', '.join(map(str, numbers))}: this slot sees {seen} GPUs, numbered from 0, and a rank has one of its own; give "
            "the slot as many, or use tensorParallel [1]"
        )


def held_by_ranks() -> int:
    """Bytes, now, of the processes of all ranks that this one has started and that have loaded their parts: private ones, and weights that they share."""
    return sum(private_bytes(process) for process in dict(_idle)) + sum(
        each.collectives.shared_bytes for each in tuple(_groups)
    )


def idle_of_ranks() -> int:
    """The same before they had loaded them."""
    return sum(dict(_idle).values())


class OtherRanks:
    """Ranks 1, 2, ... of a stage. They end with the last reference to this."""

    def __init__(self, role: Role, folder: Path, *, verify: bool, binding: Binding = UNBOUND) -> None:
        """Starts them; each loads its part of `role` from `folder`."""
        ranks = role.tensor_parallel
        kind = kind_for(device_of(role))
        file = make_file(kind, ranks)
        self.collectives = make_collectives(kind, file, 0, ranks, device_of(role))
        _groups.add(self)
        self._role = role
        self._lost = ""
        self._failed: Callable[[str], None] = log.warning
        # Steps and orders come from two threads, and have one order on all connections; of those who ask for bits one is answered at a time.
        self._sending, self._changing = threading.Lock(), threading.Lock()
        self._asked = 0  # orders that are answered
        self._connections: list[Connection] = []
        self.processes: list[RankHandle] = []
        self._ended = weakref.finalize(self, _end, self.collectives, self._connections, self.processes)
        try:
            for rank in range(1, ranks):
                ours, theirs = socket.socketpair()
                self._connections.append(Connection(ours.detach()))
                with theirs:
                    arguments = _arguments(role, rank, kind, binding.of(role, rank))
                    self.processes.append(_start(arguments, theirs.fileno(), file, fresh=_starts_fresh(role)))
                send_order(self._connections[-1], LoadPart(role, str(folder), verify))
        finally:
            os.close(file)
        for rank, process in enumerate(self.processes, 1):
            watch = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self.collectives, rank, process),
                name=f"watch rank {rank}",
                daemon=True,
            )
            watch.start()

    @property
    def alive(self) -> bool:
        return self._ended.alive

    def end(self) -> None:
        """Nobody has any use for them: they end now."""
        self._ended()

    def wait_loaded(self, still_wanted: Callable[[], None], gets_on: Callable[[], None]) -> None:
        """They have loaded their parts, and all ranks have met. Raises InputError where one could not, and whatever `still_wanted` does, which is called now and then;
        `gets_on`: when one has loaded more.
        """
        answers = self._answers(0, still_wanted, gets_on)
        for process, answer in zip(self.processes, answers, strict=True):
            _idle[process.pid] = answer.idle_bytes
            if process.has_ended:
                _idle.pop(process.pid, None)
        try:
            self._order(Join())
            self.collectives.join()
        except RankLostError as error:
            raise InputError(self._lost or str(error)) from error

    def begin(self, role: Role, failed: Callable[[str], None]) -> None:
        """An epoch begins, with the weights that are held. `failed` hears, from any thread, why it cannot go on when a rank ends."""
        self._failed = failed
        if self._lost:
            failed(self._lost)
            return
        self._order(Begin(role))

    def check_bits(self, bits: dict[int, int]) -> None:
        """Whether these layers could have these bits on every rank. Raises InputError with the reason of one where they could not."""
        with self._changing:
            self._asked += 1
            self._order(CheckBits(self._asked, bits))
            self._answers(self._asked)

    @contextlib.contextmanager
    def reading(self, layer: int, bits: int) -> Iterator[Callable[[], Growth]]:
        """Within it they read what makes a layer one of `bits` bits, beside the steps; what it gives waits for all of them and tells the bytes of
        theirs, or raises InputError with the reason of one that could not. Then `swap_bits`; where anything is raised, they drop what they have read.
        """
        with self._changing:
            self._asked += 1
            self._order(ReadBits(self._asked, layer, bits))
            try:
                yield self._bytes_read
            except BaseException:
                with contextlib.suppress(RankLostError):
                    self._order(DropBits())
                raise

    def swap_bits(self) -> None:
        """What was read is in force from the next step on. Call where no step is computed."""
        self._order(SwapBits())

    def _bytes_read(self) -> Growth:
        answers = self._answers(self._asked)
        return Growth(sum(each.added_bytes for each in answers), sum(each.returned_bytes for each in answers))

    def step(self, header: FrameHeader, inputs: torch.Tensor) -> None:
        """They compute it too, now. Raises RankLostError."""
        self._send(lambda connection: send_step(connection, header, inputs))

    def finish(self) -> None:
        """What all have added up of a step is there. Raises RankLostError."""
        self.collectives.finish()

    def _order(self, order: Order) -> None:
        self._send(lambda connection: send_order(connection, order))

    def _send(self, send: Callable[[Connection], None]) -> None:
        try:
            with self._sending:
                for connection in self._connections:
                    send(connection)
        except OSError as error:
            raise RankLostError(self._lost or f"a rank of stage {self._role.stage} has ended: {error}") from error

    def _answers(
        self, number: int, still_wanted: Callable[[], None] = lambda: None, gets_on: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """Of all ranks, once they are there; earlier ones that nobody waited for are let go. Raises InputError for the first with a reason."""
        answers = [self._answer(rank, number, still_wanted, gets_on) for rank in range(1, self._role.tensor_parallel)]
        reason = next((each.reason for each in answers if each.reason), "")
        if reason:
            raise InputError(reason)
        return answers

    def _answer(self, rank: int, number: int, still_wanted: Callable[[], None], gets_on: Callable[[], None]) -> Answer:
        connection = self._connections[rank - 1]
        try:
            while True:
                while not connection.poll(WAIT_SECONDS):
                    still_wanted()
                answer = receive_answer(connection)
                if answer.number == number:
                    return answer
                if answer.number == LOADING:
                    gets_on()
        except (EOFError, OSError):
            what = "did what it was told" if number else "loaded its part"
            return Answer(
                number, f"rank {rank} of {self._role.tensor_parallel} ended while it {what}: see the slot's log"
            )

    def lose(self, rank: int, code: int) -> None:
        """A rank's process has ended: nothing goes on without it."""
        if self._ended.alive and not self._lost:
            self._lost = f"rank {rank} of {self._role.tensor_parallel} of stage {self._role.stage} ended with {code}"
            self._ended()
            self._failed(self._lost)


def _arguments(role: Role, rank: int, kind: CollectivesName, processors: Processors) -> list[str]:
    threads = role.devices[rank].threads or torch.get_num_threads()
    values: dict[str, object] = {
        "rank": rank,
        "ranks": role.tensor_parallel,
        "collectives": kind,
        "device": device_of(role, rank),
        "threads": threads,
    }
    if processors:
        values["processors"] = ",".join(map(str, sorted(processors)))
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _start(arguments: Sequence[str], connection: int, file: int, *, fresh: bool) -> RankHandle:
    nursery = the_nursery()
    try:
        return nursery.start(arguments, connection, file, fresh=fresh)
    except OSError:
        log.warning("the process that ranks are forked from has ended: another one starts")
        return the_nursery(nursery).start(arguments, connection, file, fresh=fresh)


def _starts_fresh(role: Role) -> bool:
    """CUDA must not have been touched by whoever a process is forked from: a rank on a GPU is a program of its own."""
    return device_of(role).type == "cuda"


def _watch(group: "weakref.ref[OtherRanks]", collectives: Collectives, rank: int, process: RankHandle) -> None:
    code = process.wait()
    _idle.pop(process.pid, None)
    collectives.end()
    still = group()
    if still is not None:
        still.lose(rank, code)


def _end(collectives: Collectives, connections: list[Connection], processes: list[RankHandle]) -> None:
    """Nobody has any use for them: one that hears no more ends by itself, one that computes or loads is ended."""
    collectives.end()
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
