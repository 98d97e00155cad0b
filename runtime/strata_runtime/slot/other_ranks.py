"""The other ranks of a stage, as its first one has them: processes that load their parts and compute every step with it.

Made by the slot's prepare for a role of several devices, told of epochs by `RunningEpoch` and of steps by the stage executor. On processors a device
is some cores of the slot's node, and a rank one process on them; several GPUs in a stage are refused.
"""

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from strata_planner.contract.frames import FrameHeader
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.ranks.collectives import RankLostError
from strata_runtime.ranks.shared_memory import SharedMemory, make_segment, runs
from strata_runtime.slot.nursery import RankHandle, the_nursery
from strata_runtime.slot.rank_process import Begin, LoadPart, receive_answer, send_order, send_step

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.25  # for parts that are being loaded, between two looks at whether they are still wanted


def check_ranks(role: Role) -> None:
    """Before anything is loaded. Raises InputError for a role whose devices this slot cannot use together."""
    if len(role.devices) != role.tensor_parallel:
        raise InputError(
            f"tensorParallel {role.tensor_parallel} with {len(role.devices)} devices: a rank has one device; plan again"
        )
    if any(not device.type.lower().startswith("cpu") for device in role.devices):
        raise InputError(
            f"a stage over {role.tensor_parallel} {role.devices[0].type}: several GPUs in one stage are planned, but not run yet; use tensorParallel [1]"
        )
    if role.leader and role.speculation.has_head:
        raise InputError(
            f"a head of EAGLE-3 beside a stage over {role.tensor_parallel} devices: it reads the whole embedding, of which ranks have parts; use "
            "speculation ngram, suffix, draft or selfPrecision, or tensorParallel [1]"
        )
    if not runs():
        raise InputError(
            "ranks of a stage talk through the native library, which is not here: install a C++ compiler and run "
            "python -m strata_runtime.kernels.native.build, or use tensorParallel [1]"
        )


class OtherRanks:
    """Ranks 1, 2, ... of a stage. They end with the last reference to this."""

    def __init__(self, role: Role, folder: Path, *, verify: bool) -> None:
        """Starts them; each loads its part of `role` from `folder`."""
        ranks = role.tensor_parallel
        segment = make_segment(ranks)
        self.collectives = SharedMemory(segment, 0, ranks)
        self._role = role
        self._lost = ""
        self._failed: Callable[[str], None] = log.warning
        self._connections: list[Connection] = []
        self.processes: list[RankHandle] = []
        self._ended = weakref.finalize(self, _end, self.collectives, self._connections, self.processes)
        try:
            for rank in range(1, ranks):
                ours, theirs = socket.socketpair()
                self._connections.append(Connection(ours.detach()))
                with theirs:
                    self.processes.append(_start(rank, ranks, theirs.fileno(), segment))
                send_order(self._connections[-1], LoadPart(role, str(folder), verify))
        finally:
            os.close(segment)
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

    def wait_loaded(self, still_wanted: Callable[[], None]) -> None:
        """Raises InputError where a part could not be loaded, and whatever `still_wanted` does, which is called now and then."""
        for rank, connection in enumerate(self._connections, 1):
            try:
                while not connection.poll(WAIT_SECONDS):
                    still_wanted()
                reason = receive_answer(connection).reason
            except (EOFError, OSError):
                reason = (
                    f"rank {rank} of {self._role.tensor_parallel} ended while it loaded its part: see the slot's log"
                )
            if reason:
                raise InputError(reason)

    def begin(self, failed: Callable[[str], None]) -> None:
        """An epoch begins. `failed` hears, from any thread, why it cannot go on when a rank ends."""
        self._failed = failed
        if self._lost:
            failed(self._lost)
            return
        for connection in self._connections:
            send_order(connection, Begin())

    def step(self, header: FrameHeader, inputs: torch.Tensor) -> None:
        """They compute it too, now. Raises RankLostError."""
        try:
            for connection in self._connections:
                send_step(connection, header, inputs)
        except OSError as error:
            raise RankLostError(self._lost or f"a rank of stage {self._role.stage} has ended: {error}") from error

    def lose(self, rank: int, code: int) -> None:
        """A rank's process has ended: nothing goes on without it."""
        if self._ended.alive and not self._lost:
            self._lost = f"rank {rank} of {self._role.tensor_parallel} of stage {self._role.stage} ended with {code}"
            self._ended()
            self._failed(self._lost)


def _start(rank: int, ranks: int, connection: int, segment: int) -> RankHandle:
    values = {"rank": rank, "ranks": ranks, "threads": torch.get_num_threads()}
    arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    nursery = the_nursery()
    try:
        return nursery.start(arguments, connection, segment)
    except OSError:
        log.warning("the process that ranks are forked from has ended: another one starts")
        return the_nursery(nursery).start(arguments, connection, segment)


def _watch(group: "weakref.ref[OtherRanks]", collectives: SharedMemory, rank: int, process: RankHandle) -> None:
    code = process.wait()
    collectives.end()
    still = group()
    if still is not None:
        still.lose(rank, code)


def _end(collectives: SharedMemory, connections: list[Connection], processes: list[RankHandle]) -> None:
    """Nobody has any use for them: one that hears no more ends by itself, one that computes or loads is ended."""
    collectives.end()
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
