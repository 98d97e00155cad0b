"""One plan in a process of its own: bounded in memory, killed at its deadline or when nobody wants it any more.

All of them are forks of one parent (`plan_worker`), which has imported the planner before there is a question. Called by `planners`.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from strata_operator.act.planner_call import TOO_LARGE, Answer, Question
from strata_planner.contract.values import ContractError, from_json, to_json

log = logging.getLogger(__name__)

# The stacks and buffers of a thread per processor would count as the plan's memory, and the solvers use one thread.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BESIDE_SECONDS = 60.0  # starting, reading the model's files, comparing with alternatives
_CHUNK_BYTES = 1 << 18
_TRIES = 2  # of parents: one may have died since the last question
TOO_LONG = "lower planning.timeLimitSeconds, or narrow the search by placement.maxStages or placement.nodeSelector"


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The administrator's, over what deployments ask for."""

    side_by_side: int = 2
    memory_bytes: int = 768 << 20  # of one plan
    time_limit_seconds: float = 300.0

    def deadline_seconds(self, question: Question) -> float:
        """The planner keeps its own time limit; this is for when it does not. A layout is searched and then solved."""
        asked = (question.deployment.get("spec", {}).get("planning") or {}).get("timeLimitSeconds", 30)
        return 2 * min(float(asked), self.time_limit_seconds) + _BESIDE_SECONDS


@dataclass(frozen=True, slots=True)
class _Parent:
    process: asyncio.subprocess.Process
    orders: socket.socket

    def channel(self) -> socket.socket:
        """To a fork of its own, whenever it comes to it. Raises OSError where the parent is gone."""
        mine, its = socket.socketpair()
        mine.setblocking(False)
        try:
            with its:
                socket.send_fds(self.orders, [b"."], [its.fileno()])
        except OSError:
            mine.close()
            raise
        return mine

    async def end(self) -> None:
        self.orders.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass(frozen=True, slots=True)
class _Fork:
    """`pidfd`: it can be ended by, and never another process that has got its number."""

    channel: socket.socket
    pidfd: int

    async def ask(self, question: bytes) -> bytes:
        """Empty where it ended without an answer."""
        loop, said = asyncio.get_running_loop(), bytearray()
        with suppress(ConnectionError):
            await loop.sock_sendall(self.channel, question)
            self.channel.shutdown(socket.SHUT_WR)
            while part := await loop.sock_recv(self.channel, _CHUNK_BYTES):
                said += part
        return bytes(said)

    async def end(self) -> None:
        """Returns when it is gone."""
        self.channel.close()
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            await _until_readable(self.pidfd)
        finally:
            os.close(self.pidfd)


class PlanProcess:
    """Answers each question in a process of its own."""

    def __init__(self, limits: PlanLimits) -> None:
        self._limits = limits
        self._parent: asyncio.Task[_Parent] | None = None

    def warm(self) -> None:
        """Have a parent that imports, or has imported, what plans need."""
        if self._parent is None:
            self._parent = asyncio.create_task(self._start())

    async def answer(self, question: Question) -> Answer:
        name = question.deployment.get("metadata", {}).get("name", "")
        log.info("%s is planned on %d nodes: %s", name, len(question.cluster.nodes), question.reason)
        question = msgspec.structs.replace(question, time_limit_seconds=self._limits.time_limit_seconds)
        seconds, began = self._limits.deadline_seconds(question), time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                said = await self._ask(to_json(question))
        except TimeoutError:
            took = time.monotonic() - began
            return Answer(None, "NoPlanInTime", f"planning was ended after {took:.0f} s; {TOO_LONG}")
        try:
            return from_json(said, Answer)
        except ContractError:
            most = self._limits.memory_bytes >> 20
            message = (
                f"planning ended without an answer, as a process does that needs more than its {most} MiB: {TOO_LARGE}"
            )
            return Answer(None, "PlanTooLarge", message, passing=True)

    async def close(self) -> None:
        parent, self._parent = self._parent, None
        if parent is not None:
            await (await parent).end()

    async def _ask(self, question: bytes) -> bytes:
        fork = await self._fork()
        try:
            return await fork.ask(question)
        finally:
            await asyncio.shield(fork.end())

    async def _fork(self) -> _Fork:
        """Raises OSError where no parent lives long enough."""
        for tried in range(_TRIES):
            self.warm()
            assert self._parent is not None
            parent = await asyncio.shield(self._parent)
            try:
                return await _forked(parent.channel())
            except OSError:
                if tried + 1 == _TRIES:
                    raise
                await self._replace(parent)
        raise AssertionError

    async def _replace(self, parent: _Parent) -> None:
        if self._parent is not None and self._parent.done() and self._parent.result() is parent:
            self._parent = None
            await parent.end()

    async def _start(self) -> _Parent:
        mine, its = socket.socketpair()
        command = (sys.executable, "-m", "strata_operator.act.plan_worker", str(self._limits.memory_bytes))
        with its:
            process = await asyncio.create_subprocess_exec(*command, stdin=its.fileno(), env=os.environ | _ONE_THREAD)
        return _Parent(process, mine)


async def _forked(channel: socket.socket) -> _Fork:
    """Raises ConnectionError where the channel is closed before anybody has answered on it."""
    try:
        await _until_readable(channel.fileno())
        _, found, _, _ = socket.recv_fds(channel, 1, 1)
    except BaseException:
        channel.close()  # a fork that comes later finds that nobody asks
        raise
    if not found:
        channel.close()
        raise ConnectionResetError("the process that forks for plans has ended")
    return _Fork(channel, found[0])


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def is_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(descriptor, is_readable)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
