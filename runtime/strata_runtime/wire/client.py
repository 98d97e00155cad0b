"""Blocking clients of slots and leaders: what tests, benchmarks and scripts drive a pipeline with.

The operator and the supervisor have their own asynchronous controller, the gateway its own journal; these are the smallest
ones that speak the same contract.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import zmq

from strata_planner.contract import control, frames
from strata_planner.contract.control import (
    SWITCH_OVER,
    Commit,
    GetStatus,
    Prepare,
    SetBits,
    SlotAddress,
    SlotStatus,
    SwitchState,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.frames import Hello, LeaderHello, Rejected, Sampling, Submit, TokenEvent, Tokens
from strata_planner.contract.keys import RoleKeys, request_secret, role_keys
from strata_planner.contract.moves import moves_between, page_orders
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.errors import RequestRefusedError, RuntimeFaultError
from strata_runtime.wire.transport import Keys, connect

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.005
_SWITCH_POLL_SECONDS = 0.03  # a status counts the process's pages, for which the kernel holds up what gives memory back


class SlotClient:
    """The control port of one slot."""

    def __init__(self, name: str, address: SlotAddress, control_key: str) -> None:
        self.name = name
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context()
        endpoint = f"tcp://{address.host}:{address.control_port}"
        keys = Keys.of(control_key)
        self._socket = connect(self._context.socket(zmq.DEALER), endpoint, keys, control.LARGEST_CONTROL_BYTES)

    def ask(self, request: control.SlotRequest) -> SlotStatus:
        """Raises RuntimeFaultError if the slot does not answer in time."""
        self.send(request)
        return self.answer()

    def send(self, request: control.SlotRequest) -> None:
        """What `answer` answers."""
        self._socket.send(control.encode(request))

    def answer(self) -> SlotStatus:
        """Raises RuntimeFaultError if the slot does not answer in time."""
        if not self._socket.poll(int(PATIENCE_SECONDS * 1000)):
            raise RuntimeFaultError(f"slot {self.name} at {self.address} does not answer for {PATIENCE_SECONDS} s")
        status = decode_message(control.status_decoder, self._socket.recv_multipart(), control.LARGEST_CONTROL_BYTES)
        if not isinstance(status, SlotStatus):
            raise RuntimeFaultError(f"{self.address} answers as a gateway, not as slot {self.name}")
        return status

    def listens(self) -> bool:
        """Whether its process does."""
        with suppress(OSError), socket.create_connection((self.address.host, self.address.control_port), 1):
            return True
        return False

    def until(self, wanted: Callable[[SlotStatus], bool]) -> SlotStatus:
        """Ask until the status is as wanted."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not wanted(status := self.ask(GetStatus())):
            if time.monotonic() > deadline:
                raise RuntimeFaultError(f"slot {self.name} stays at {status}")
            time.sleep(_POLL_SECONDS)
        return status

    def set_bits(self, request: SetBits) -> SwitchState:
        """Returns when the request is over, however it ended. Raises RuntimeFaultError if the slot was started anew meanwhile."""
        status = self.ask(request)
        while True:
            state = next((each for each in status.switches if each.request == request), None)
            if state is None:
                raise RuntimeFaultError(f"slot {self.name} knows nothing of {request}: it was started anew; ask again")
            if state.phase in SWITCH_OVER:
                return state
            time.sleep(_SWITCH_POLL_SECONDS)
            status = self.ask(GetStatus())

    def close(self) -> None:
        self._context.destroy(linger=0)


class LeaderClient:
    """The request port of a leader: submit, then collect tokens."""

    def __init__(self, address: SlotAddress, key: str, place: int = 0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        endpoint = f"tcp://{address.host}:{address.request_port + place}"
        self._socket = connect(self._context.socket(zmq.DEALER), endpoint, Keys.of(key), frames.LARGEST_ANSWER_BYTES)

    def hello(self) -> LeaderHello:
        self.send(Hello())
        while not isinstance(message := self.receive(), LeaderHello):
            continue
        return message

    def send(self, message: frames.GatewayMessage) -> None:
        self._socket.send(frames.encode(message))

    def heard(self, seconds: float) -> bool:
        return bool(self._socket.poll(int(seconds * 1000)))

    def receive(self) -> frames.LeaderMessage:
        """Raises RuntimeFaultError if nothing comes in time."""
        if not self.heard(PATIENCE_SECONDS):
            raise RuntimeFaultError(f"the leader says nothing for {PATIENCE_SECONDS} s")
        received = self._socket.recv_multipart()
        return decode_message(frames.leader_message_decoder, received, frames.LARGEST_ANSWER_BYTES)

    def events(self) -> list[TokenEvent]:
        """The tokens of the next message. Raises RequestRefusedError for a rejected request."""
        message = self.receive()
        if isinstance(message, Rejected):
            raise RequestRefusedError(message.reason)
        return message.events if isinstance(message, Tokens) else []

    def generate(self, submits: Sequence[Submit]) -> dict[str, list[int]]:
        """Run requests to their ends; the tokens of each."""
        for submit in submits:
            self.send(submit)
        return self.collect(submit.request for submit in submits)

    def collect(self, requests: Iterable[str]) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {request: [] for request in requests}
        unfinished = set(tokens)
        while unfinished:
            for event in self.events():
                tokens[event.request].append(event.token)
                if event.finish:
                    unfinished.discard(event.request)
        return tokens

    def close(self) -> None:
        self._context.destroy(linger=0)


class PipelineClient:
    """A controller for running slots: one epoch after another."""

    def __init__(self, slots: Mapping[str, SlotClient]) -> None:
        self.slots = dict(slots)
        self.epoch = 0
        self.key = ""
        self.role_keys: dict[str, RoleKeys] = {}  # of each slot's first role
        self._in_force: Plan | None = None
        self._leaders: list[LeaderClient] = []

    def prepare(self, plan: Plan) -> dict[str, Prepare]:
        """Ask every slot of the plan, and those that only have pages for it, to prepare the next epoch; the messages by slot."""
        self.epoch += 1
        root = f"epoch {self.epoch}"
        self.key = request_secret(root)
        addresses = {name: slot.address for name, slot in self.slots.items()}
        shadows = plan.shadow_orders
        roles_by_slot = roles_of(plan)
        orders = page_orders(moves_between(self._served(), roles_by_slot), addresses, root)
        messages = {
            name: Prepare(
                epoch=self.epoch,
                key=self.key,
                roles=roles,
                slots=addresses,
                role_keys=tuple(role_keys(root, role) for role in roles),
                shadow=shadows.get(name),
                sources=orders.sources.get(name, ()),
                giving=orders.giving.get(name),
            )
            for name in dict.fromkeys((*roles_by_slot, *orders.giving))
            for roles in [roles_by_slot.get(name, ())]
        }
        self.role_keys = {name: message.role_keys[0] for name, message in messages.items() if message.role_keys}
        for name, message in messages.items():
            self.slots[name].ask(message)
        return messages

    def _served(self) -> dict[str, tuple[Role, ...]]:
        """The roles in force, of slots that are there."""
        roles = roles_of(self._in_force) if self._in_force else {}
        return {name: each for name, each in roles.items() if self.slots[name].listens()}

    def serve(self, plan: Plan) -> LeaderClient:
        """One whole change of epoch, then a client of replica 0's leader. Raises RuntimeFaultError for a refusal."""
        return self.commit(plan, self.prepared(plan))

    def prepared(self, plan: Plan) -> list[str]:
        """Who has prepared the next epoch: all that were asked. Raises RuntimeFaultError for a refusal."""
        names = list(self.prepare(plan))
        for name in names:
            state = self.slots[name].until(lambda status: status.prepare.phase in ("prepared", "refused")).prepare
            if state.phase == "refused":
                raise RuntimeFaultError(f"slot {name} refuses epoch {self.epoch}: {state.reason}")
        return names

    def commit(self, plan: Plan, names: Iterable[str]) -> LeaderClient:
        """What all of these have prepared comes into force, side by side. Raises RuntimeFaultError for a slot where it does not."""
        names = list(names)
        for name in names:
            self.slots[name].send(Commit(epoch=self.epoch))
        for name, status in [(name, self.slots[name].answer()) for name in names]:
            if status.committed_epoch != self.epoch:
                raise RuntimeFaultError(f"slot {name} did not commit epoch {self.epoch}: {status.failure}")
        self._in_force = plan
        leader = LeaderClient(self.slots[plan.replicas[0].stages[0].slot].address, self.key)
        self._leaders.append(leader)
        leader.hello()
        return leader

    def close(self) -> None:
        """Close every connection, those of earlier epochs too."""
        for leader in self._leaders:
            leader.close()
        for slot in self.slots.values():
            slot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def greedy(name: str, prompt: Sequence[int], answer: int, delivered: Sequence[int] = (), salt: str = "") -> Submit:
    """A request for exactly `answer` most likely tokens."""
    return Submit(name, list(prompt), list(delivered), answer, [], Sampling(temperature=0), salt=salt)
