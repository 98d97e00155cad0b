"""Standing orders at a slot: sealed by its controller, taken where no controller is heard, and nothing else by their key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from strata_planner.contract.control import (
    CarryOut,
    Commit,
    CommitOrder,
    GetStatus,
    Prepare,
    SlotDoor,
    Watch,
    encode,
)
from strata_planner.contract.keys import order_secret, seal_of
from strata_runtime.gateway.standing.doors import Doors
from strata_runtime.slot.ordered import Standing, why_not
from strata_runtime.wire.transport import Keys, connect
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import CONTROL_KEY, PipelineHarness

NAMES = ["s0", "s1"]


def order_for(prepare: Prepare, after: int, silence_seconds: float = 0.0, secret: str = CONTROL_KEY) -> CarryOut:
    words = CarryOut(after, silence_seconds, encode(prepare).decode(), seal="")
    return msgspec.structs.replace(words, seal=seal_of(secret, words.sealed))


AN_ORDER = order_for(Prepare(epoch=7, key="k", roles=(), slots={}), after=3, silence_seconds=20.0, secret="mine")


@pytest.mark.parametrize(
    ("changes", "at", "said"),
    [
        pytest.param({}, Standing("mine", 3, 20.0), "", id="taken"),
        pytest.param({}, Standing("mine", 0, float("inf")), "", id="taken by one that was started anew"),
        pytest.param({}, Standing("mine", 3, 19.9), "controller was heard 19.9 s ago", id="a controller is there"),
        pytest.param({}, Standing("mine", 2, 30.0), "epoch 2 is in force", id="it was written for another epoch"),
        pytest.param({}, Standing("another's", 3, 30.0), "seal", id="it was written for another slot"),
        pytest.param({"silence_seconds": 0.0}, Standing("mine", 3, 1.0), "seal", id="patience was changed on the way"),
        pytest.param({"after": 2}, Standing("mine", 2, 30.0), "seal", id="the epoch was changed on the way"),
        pytest.param({"prepare": "{}"}, Standing("mine", 3, 30.0), "seal", id="what it says was changed on the way"),
        pytest.param({"seal": "ü"}, Standing("mine", 3, 30.0), "seal", id="the seal is none"),
    ],
)
def test_an_order_is_taken_as_it_was_written(changes: dict[str, Any], at: Standing, said: str) -> None:
    reason = why_not(msgspec.structs.replace(AN_ORDER, **changes), at)
    assert said in reason
    assert bool(said) == bool(reason)


@pytest.fixture
def pipeline() -> Iterator[PipelineHarness]:
    with PipelineHarness(NAMES) as made:
        yield made


def doors_of(pipeline: PipelineHarness) -> dict[str, SlotDoor]:
    public, secret = Keys.of(CONTROL_KEY).server_public.decode(), order_secret(CONTROL_KEY)
    return {name: SlotDoor("127.0.0.1", pipeline.slots[name].address.control_port, public, secret) for name in NAMES}


async def test_slots_are_led_into_the_epoch_of_an_order_by_a_gateways_key(
    pipeline: PipelineHarness, tiny_llama: Path
) -> None:
    plan = even_plan(tiny_llama, NAMES)
    pipeline.serve(plan)
    after = pipeline.epoch
    prepares = pipeline.prepare(plan)  # of a controller, and not committed
    doors = Doors(doors_of(pipeline))
    try:
        for name, prepare in prepares.items():
            later = msgspec.structs.replace(prepare, epoch=prepare.epoch + 1)
            early = await doors.ask(name, order_for(later, after, silence_seconds=60.0))
            assert early is not None
            assert early.prepare.epoch == prepare.epoch, "a controller has just been heard"
            await doors.ask(name, CommitOrder(prepare.epoch))
            status = await doors.ask(name, order_for(later, after))
            assert status is not None
            assert (status.committed_epoch, status.prepare.epoch) == (after, later.epoch), "no order has made the other"
        for name in NAMES:
            pipeline.slots[name].until(lambda status: status.prepare.phase == "prepared")
            status = await doors.ask(name, CommitOrder(prepares[name].epoch + 1))
            assert status is not None
            assert status.committed_epoch == prepares[name].epoch + 1
    finally:
        doors.close()


async def test_the_key_for_orders_opens_nothing_else(pipeline: PipelineHarness, tiny_llama: Path) -> None:
    pipeline.serve(even_plan(tiny_llama, NAMES))
    doors, context = Doors(doors_of(pipeline)), zmq.Context()
    try:
        keys = Keys.of(order_secret(CONTROL_KEY)).of_server(Keys.of(CONTROL_KEY).server_public.decode())
        endpoint = f"tcp://127.0.0.1:{pipeline.slots['s0'].address.control_port}"
        silent = connect(context.socket(zmq.DEALER), endpoint, keys)  # and who only connects holds nobody up
        speaks = connect(context.socket(zmq.DEALER), endpoint, keys)
        for message in (Prepare(epoch=9, key="k", roles=(), slots={}), Commit(9), Watch(), GetStatus()):
            speaks.send(encode(message))
        speaks.poll(10_000)
        answers = [speaks.recv()]
        while speaks.poll(0):
            answers.append(speaks.recv())
        status = await doors.ask("s0", GetStatus())
        assert status is not None
        assert (status.committed_epoch, status.prepare.epoch) == (pipeline.epoch, pipeline.epoch)
        assert len(answers) == 1, "the question for its status alone was answered"
        silent.close(linger=0)
        speaks.close(linger=0)
    finally:
        doors.close()
        context.term()
