"""The leader: the worker of stage 0. Gateways' requests go in, steps go down the pipeline, tokens come back.

Made by the slot at commit. The engine decides; this thread moves messages and runs stage 0's own layers.
"""

import logging
from typing import Any

import msgspec
import torch
import zmq

from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import (
    Abort,
    FrameHeader,
    GatewayMessage,
    Hello,
    LeaderHello,
    LeaderMessage,
    Rejected,
    StepResult,
    Submit,
    TokenEvent,
    Tokens,
    encode,
    gateway_message_decoder,
)
from strata_planner.contract.roles import Role
from strata_runtime.errors import RequestRefusedError, StepError
from strata_runtime.scheduler.engine import Engine, Step
from strata_runtime.scheduler.scheduler import Limits
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.worker import Inlet, Outlet

log = logging.getLogger(__name__)


def limits_of(role: Role) -> Limits:
    return Limits(
        stages=role.stages,
        micro_batch=role.micro_batch,
        page_tokens=role.page_tokens,
        page_budget=role.replica_page_budget,
        max_model_len=role.max_model_len,
    )


class Gateways:
    """The requests' socket: who asked for what."""

    def __init__(self, socket: zmq.Socket[Any], epoch: int, incarnation: str) -> None:
        self.socket = socket
        self._epoch = epoch
        self._incarnation = incarnation
        self._owner: dict[str, bytes] = {}

    def receive(self) -> tuple[bytes, GatewayMessage] | None:
        """One message with its sender's identity; None for one that does not decode (logged)."""
        identity, payload = self.socket.recv_multipart()
        try:
            return identity, gateway_message_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("a gateway sent a message that does not decode: %s", error)
            return None

    def own(self, request: str, identity: bytes) -> None:
        self._owner[request] = identity

    def disown(self, request: str) -> None:
        self._owner.pop(request, None)

    def send(self, identity: bytes, message: LeaderMessage) -> bool:
        """False if that gateway is gone."""
        try:
            self.socket.send_multipart([identity, encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def hello(self, identity: bytes, engine: Engine, role: Role) -> None:
        most = engine.scheduler.limits.most_tokens
        load = (engine.running, engine.waiting, engine.kv_usage)
        self.send(identity, LeaderHello(role.replica, self._epoch, self._incarnation, most, *load))

    def deliver(self, events: list[TokenEvent], engine: Engine, role: Role) -> list[str]:
        """Send each gateway its tokens; the requests whose gateway is gone."""
        by_owner: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            by_owner.setdefault(self._owner[event.request], []).append(event)
            if event.finish:
                del self._owner[event.request]
        load = (engine.running, engine.waiting, engine.kv_usage)
        orphans: list[str] = []
        for identity, own in by_owner.items():
            if not self.send(identity, Tokens(role.replica, self._epoch, own, *load)):
                orphans.extend(event.request for event in own if not event.finish)
        return orphans


class LeaderWorker:
    """Stage 0 of a replica. Without other stages (`links` is None) it samples its own tokens."""

    def __init__(
        self, executor: StageExecutor, epoch: int, hidden: int, gateways: Gateways, links: tuple[Inlet, Outlet] | None
    ) -> None:
        self.executor = executor
        self.engine = Engine(limits_of(executor.role))
        self._epoch = epoch
        self._hidden = hidden
        self._dtype: ComputeType = executor.role.compute_type
        self._gateways = gateways
        self._inlet: Inlet | None = links[0] if links else None
        self._outlet: Outlet | None = links[1] if links else None
        self._poller = zmq.Poller()
        self._poller.register(gateways.socket, zmq.POLLIN)
        if self._inlet is not None:
            self._poller.register(self._inlet.socket, zmq.POLLIN)

    def run(self) -> None:
        stepped = False
        try:
            while True:
                self._receive(wait=not stepped)
                stepped = self._step()
        finally:
            self._gateways.socket.close()
            if self._inlet is not None and self._outlet is not None:
                self._inlet.close()
                self._outlet.close()

    def _receive(self, *, wait: bool) -> None:
        """Take in all that has come: results first, they free the pipeline."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._inlet is not None and self._inlet.socket in ready:
            self._take_result(self._inlet)
        if self._gateways.socket in ready:
            received = self._gateways.receive()
            if received is not None:
                self._answer(*received)

    def _take_result(self, inlet: Inlet) -> None:
        received = inlet.receive()
        if received is None:
            return
        if not isinstance(received[0], StepResult):
            raise StepError("the leader got a frame of hidden states; only results come back to stage 0")
        self._deliver(received[0])

    def _answer(self, identity: bytes, message: GatewayMessage) -> None:
        match message:
            case Hello():
                self._gateways.hello(identity, self.engine, self.executor.role)
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
        step = self.engine.next_step()
        if step is None:
            return False
        header = self._header(step)
        output = self.executor.run(header, torch.tensor(step.token_ids, dtype=torch.int64))
        if isinstance(output, StepResult):
            self._deliver(output)
        elif self._outlet is not None:
            self._outlet.frame(header, output)
        return True

    def _header(self, step: Step) -> FrameHeader:
        replica = self.executor.role.replica
        return FrameHeader(
            replica, self._epoch, step.step, "", step.segments, step.operations, self._dtype, self._hidden
        )

    def _deliver(self, result: StepResult) -> None:
        events = self.engine.take(result)
        if events:
            for orphan in self._gateways.deliver(events, self.engine, self.executor.role):
                self._gateways.disown(orphan)
                self.engine.abort(orphan)
