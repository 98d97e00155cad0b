"""Fuzzed messages of somebody who holds a deployment's control secret: mutated contents, wrong numbers of frames, odd sizes.

The holder may give orders, so a mutant that still is one (a prepare or commit of a higher epoch, a new route) is left out: what
remains must be refused, and the port must go on answering.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from benchmarks.attack.http_requests import VALUES, turned, written
from benchmarks.attack.keys import ask_status, holder
from benchmarks.attack.target import Outcome, Target
from strata_planner.contract.control import gateway_request_decoder, slot_request_decoder

_HELD = 50  # messages on one connection, then a status must still come
_PLANS_NOTHING: tuple[dict[str, Any], ...] = (
    {"type": "getStatus"}, {"type": "watch"}, {"type": "commit", "epoch": 0}, {"type": "prepare", "epoch": 0, "key": "k", "roles": [], "slots": {}},
    {"type": "setBits", "epoch": 1, "replica": 0, "stage": 0, "bits": {}}, {"type": "setBits", "epoch": 1, "replica": 9, "stage": -1, "bits": {"0": 3, "-1": 99}},
    {"type": "setRoute", "epoch": 0, "key": "k", "leaders": [], "max_model_len": 1}, {"type": "setRoute", "epoch": -1, "key": "", "leaders": [{"replica": 0, "slot": "x", "endpoint": "y", "tokens_per_second": 0}], "max_model_len": 0},
)  # fmt: skip


def make(seed: int, number: int) -> list[bytes]:
    """The frames of attack number `number` of this seed."""
    rng = random.Random(f"control/{seed}/{number}")
    payload = _payload(rng)
    match rng.randrange(6):
        case 0:
            return [b"", payload]
        case 1:
            return [payload, rng.choice((b"", b"\x00", payload))]
        case 2:
            return [rng.randbytes(rng.choice((0, 1, 300))) for _ in range(rng.choice((1, 2, 3, 9)))]
        case _:
            return [payload]


def fuzz(target: Target, seed: int, first: int, count: int) -> Outcome:
    outcome = Outcome()
    for start in range(first, first + count, _HELD):
        port = target.control_ports[start // _HELD % len(target.control_ports)]
        with holder(zmq.DEALER, port, target.secrets[port]) as socket:
            for number in range(start, min(start + _HELD, first + count)):
                socket.send_multipart(make(seed, number))
                outcome.attacks += 1
                while socket.poll(0):
                    socket.recv_multipart()
                    outcome.answers["answered"] += 1
        if ask_status(port, target.secrets[port]) is None:
            who = "the gateway" if port == target.gateway_control else "a slot"
            outcome.complaints.append(
                f"control frames {start}..{start + _HELD} of seed {seed}: {who}'s control port does not answer any more"
            )
    return outcome


def _payload(rng: random.Random) -> bytes:
    """Never an order: see the module."""
    while True:
        order = dict(rng.choice(_PLANS_NOTHING))
        for _ in range(rng.choice((0, 1, 2))):
            order[rng.choice((*order, "type", "roles", "slots", "bits"))] = rng.choice(VALUES)
        data = written(order)
        if rng.random() < 0.4:
            data = turned(rng, data)
        if rng.random() < 0.02:
            data = json.dumps({"type": "getStatus", "x": "a" * 500_000}).encode()
        if not _is_order(data):
            return data


def _is_order(data: bytes) -> bool:
    decoders: Sequence[msgspec.json.Decoder[Any]] = (slot_request_decoder, gateway_request_decoder)
    for decoder in decoders:
        try:
            request = decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        if getattr(request, "epoch", 0) > 0 and type(request).__name__ != "SetBits":
            return True
        if getattr(request, "bits", {}):  # would really move layers
            return _moves_layers(request)
    return False


def _moves_layers(request: Any) -> bool:
    return (request.replica, request.stage) in {(0, 0), (0, 1)} and any(
        3 <= bits <= 16 for bits in request.bits.values()
    )
