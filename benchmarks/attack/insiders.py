"""Frames with the right keys and wrong contents: what a broken or taken-over slot or gateway could send.

Two slots of their own, because an epoch's key is told to nobody: this module is their controller. An epoch may fail of such a
frame, and then has to say why; processes live on, memory stays, and the next epoch answers as the first did.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from benchmarks.attack.http_requests import turned
from benchmarks.attack.keys import holder
from benchmarks.attack.target import HOST, Outcome, Target
from benchmarks.memory import Mark
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.control import GetStatus
from strata_planner.contract.frames import (
    Abort,
    FrameHeader,
    Free,
    Hello,
    Open,
    SampledToken,
    Sampling,
    Segment,
    StepResult,
    Submit,
    TokenEvent,
    Tokens,
    encode,
)
from strata_planner.contract.plan import Plan
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

MOST_GROWTH_BYTES = 50_000_000
_START_SECONDS = 300.0
_ANSWER_SECONDS = 30.0  # slots have the attacker's low priority, too
_NOTICE_SECONDS = 0.4
_PROMPT, _ANSWER = (5, 9, 11, 40), 6
_NUMBERS = (0, 1, -1, 2, 7, 100, 4095, 4096, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, -(2**31), -(2**62))
_ODD: tuple[Any, ...] = (
    *_NUMBERS,
    None,
    "",
    "x" * 5000,
    b"\xff",
    [],
    [[]],
    {},
    1.5,
    float("nan"),
    float("inf"),
    True,
    "bfloat16",
    "float16",
    "stop",
)
_HUGE_BYTES = 64 << 20

Frames = list[bytes]


def fuzz(target: Target, plan: Plan, seed: int, first: int, count: int) -> Outcome:
    """Attacks number `first` to `first + count` of this seed. `target` is not used: the attacked slots are this function's own."""
    del target
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the slots' tracebacks are what is wanted here, not news
    outcome = Outcome()
    with slot_processes(plan) as slots:
        for slot in slots.values():
            _await_start(slot)
        pair = Pair(plan, slots)
        marks = {name: Mark(slot.process.pid) for name, slot in slots.items()}
        before = {name: mark.private_bytes for name, mark in marks.items()}
        for number in range(first, first + count):
            what, complaint = pair.attack(random.Random(f"insiders/{seed}/{number}"))
            outcome.attacks += 1
            outcome.answers[complaint or what] += 1
            if complaint:
                outcome.complaints.append(f"insider frame {number} of seed {seed}: {what}: {complaint}")
            if pair.ended():
                outcome.complaints.append(f"insider frame {number} of seed {seed} ended {pair.ended()}: {what}")
                break
        else:
            grown = {name: mark.private_bytes - before[name] for name, mark in marks.items()}
            for name, growth in grown.items():
                if growth > MOST_GROWTH_BYTES:
                    outcome.complaints.append(f"insiders made {name} grow by {growth / 1e6:.0f} MB")
    return outcome


def _await_start(slot: SlotProcess) -> None:
    """At an attacker's low priority, on a busy machine, that takes longer than a client waits for an answer."""
    deadline = time.monotonic() + _START_SECONDS
    while slot.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HOST, slot.address.control_port)):
            return
        time.sleep(0.1)
    raise RuntimeFaultError(
        f"slot {slot.name} does not listen after {_START_SECONDS:g} s (exit code: {slot.process.poll()})"
    )


class Pair:
    """Two slots in an epoch whose key is known here."""

    def __init__(self, plan: Plan, slots: Mapping[str, SlotProcess]) -> None:
        self._plan = plan
        self._slots = slots
        self._client = PipelineClient(slots)
        self._leader = self._client.serve(plan)
        self._asked = 0
        self._reference = self._answer()
        self._fresh = False

    def ended(self) -> str:
        return ", ".join(name for name, slot in self._slots.items() if slot.process.poll() is not None)

    def attack(self, rng: random.Random) -> tuple[str, str]:
        """What was sent and what is wrong with what came of it, if anything."""
        first, last = self._plan.replicas[0].stages[0].slot, self._plan.replicas[0].stages[-1].slot
        kind: Callable[[random.Random, int], tuple[str, Frames]]
        kind, port, socket_kind = rng.choice((
            (to_follower, self._slots[last].address.data_port, zmq.PUSH),
            (to_leader, self._slots[first].address.data_port, zmq.PUSH),
            (to_requests, self._slots[first].address.request_port, zmq.DEALER),
        ))  # fmt: skip
        slot = first if kind is to_leader else last
        if socket_kind == zmq.PUSH and not self._fresh:
            self._renew()  # a stage refuses a gap in the steps first: the mutant is step 0
        self._fresh = False
        what, frames = kind(rng, self._client.epoch)
        secret = self._client.role_keys[slot].own if socket_kind == zmq.PUSH else self._client.key
        with holder(socket_kind, port, secret, linger_milliseconds=2000) as sender:
            sender.send_multipart(frames)
        try:
            return what, self._aftermath()
        except (RuntimeFaultError, OSError) as error:
            return what, f"{type(error).__name__} {error}"

    def _aftermath(self) -> str:
        """Complaint, or nothing: the epoch named its failure and the next one is well, or it goes on as it was."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        while time.monotonic() < deadline and not self.ended():
            if self._broken():
                return self._recovered()
            time.sleep(0.02)
        if self.ended():
            return "a process ended"
        answer = self._answer()
        if answer == self._reference:
            return ""
        if self._broken():
            return self._recovered()
        complaint = f"no failure is named, and the answer is {answer}"
        return self._recovered() or complaint

    def _recovered(self) -> str:
        """What is wrong in the next epoch, if anything."""
        self._renew()
        answer = self._answer()
        self._renew()
        return "" if answer == self._reference else f"the next epoch answers {answer}"

    def _broken(self) -> bool:
        statuses = [slot.ask(GetStatus()) for slot in self._slots.values()]
        return any(status.failure or status.lost_peers for status in statuses)

    def _renew(self) -> None:
        self._leader = self._client.serve(self._plan)
        self._fresh = True

    def _answer(self) -> list[int]:
        """The greedy answer to one prompt; what of it came in time."""
        self._asked += 1
        self._fresh = False
        return collected(self._leader, greedy(f"check {self._asked}", _PROMPT, _ANSWER))


def collected(leader: LeaderClient, submit: Submit) -> list[int]:
    leader.send(submit)
    tokens: list[int] = []
    deadline = time.monotonic() + _ANSWER_SECONDS
    while leader.heard(max(0.0, deadline - time.monotonic())):
        for event in leader.events():
            if event.request == submit.request:
                tokens.append(event.token)
                if event.finish:
                    return tokens
    return tokens


def to_follower(rng: random.Random, epoch: int) -> tuple[str, Frames]:
    """A frame of hidden states, some of it wrong."""
    length = rng.choice((1, 1, 4, 64))
    header = FrameHeader(
        0, epoch, 0, "", [Segment(1, 0, length, 1, tuple(range(4)))], [Open(1, Sampling(temperature=0))], "float32", 256
    )
    values = msgspec.to_builtins(header)
    if rng.random() < 0.3:
        extra = (
            Free(1),
            Free(-1),
            Free(2**40),
            Open(1, Sampling()),
            Open(2**40, Sampling(temperature=-1.0)),
            Free(99),
            Open(1, Sampling(logprobs=10**6)),
        )
        values[6] = [*values[6], *(msgspec.to_builtins(each) for each in rng.choices(extra, k=3))]
    if rng.random() < 0.15:
        values[5] = values[5] * rng.choice((0, 2, 1000))
    body = bytes(length * 256 * 4)
    if rng.random() < 0.3:
        body = rng.choice((b"", b"\0", body[:-1], body + b"\0" * 4, body * 3, b"\xff" * len(body), bytes(_HUGE_BYTES)))
    return _sent(rng, "to the follower", values, body)


def to_leader(rng: random.Random, epoch: int) -> tuple[str, Frames]:
    """A step's result that nobody computed."""
    token = SampledToken(0, 3, 17, -0.5, [(17, -0.5)])
    values = msgspec.to_builtins(StepResult(0, epoch, 0, [token] * rng.choice((0, 1, 2, 5000))))
    if rng.random() < 0.1:
        values = msgspec.to_builtins(FrameHeader(0, epoch, 0, "", [], [], "float32", 256))
    return _sent(rng, "to the leader", values, b"")


def to_requests(rng: random.Random, epoch: int) -> tuple[str, Frames]:
    """A gateway's message that no gateway makes."""
    prompt = rng.choice(([5, 9], [], [-1], [4096], [2**40], [5] * 5000, [2**62] * 3))
    sampling = Sampling(
        temperature=rng.choice((0, 1.0, 1e-40, -1.0, float("nan"), float("inf"))),
        top_p=rng.choice((1.0, 0.0, -1.0, 2.0, float("nan"))),
        top_k=rng.choice(_NUMBERS),
        seed=rng.choice(_NUMBERS),
        logprobs=rng.choice((-1, 0, 5, 10**6, -7)),
    )
    message = rng.choice((
        Submit(rng.choice(("a", "", "x" * 5000)), prompt, rng.choice(([], [3], [2**40], [1] * 900)), rng.choice(_NUMBERS), [], sampling),
        Abort("nobody"),
        Hello(),
        Tokens(0, epoch, [TokenEvent("a", 0, 1, 0.0, [], None)], 0, 0, 0.0),
    ))  # fmt: skip
    return _sent(rng, "to the request port", msgspec.to_builtins(message), b"", multipart=rng.random() < 0.2)


def _sent(rng: random.Random, what: str, values: Any, body: bytes, *, multipart: bool = True) -> tuple[str, Frames]:
    changed = [_change(rng, values) for _ in range(rng.choice((0, 1, 1, 2)))]
    data = encode(values)
    if rng.random() < 0.15:
        data, changed = turned(rng, data), [*changed, "bytes"]
    frames = [data, body] if multipart else [data]
    if rng.random() < 0.1:
        frames = rng.choice(([], [data], [data, body, body], [b"", data], [body, data], [data] * 50)) or [b""]
        changed.append(f"{len(frames)} frames")
    return f"{what}, {' and '.join(changed) or 'as it is'}", frames


def _change(rng: random.Random, values: Any, path: str = "") -> str:
    """One leaf of nested lists becomes odd; its path and value."""
    if not isinstance(values, list) or not values:
        return f"{path} unchanged"
    place = rng.randrange(len(values))
    if isinstance(values[place], list) and values[place] and rng.random() < 0.85:
        return _change(rng, values[place], f"{path}[{place}]")
    odd = rng.choice(_ODD if rng.random() < 0.5 else _NUMBERS)
    with contextlib.suppress(TypeError):
        values[place] = odd
    return f"{path}[{place}] = {str(odd)[:20]}"
