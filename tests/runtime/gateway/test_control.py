"""The control port: routes in, statuses out, only for who knows the secret."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from strata_planner.contract.control import (
    GATEWAY_PROTOCOL,
    EpochChange,
    GatewayStatus,
    GetStatus,
    Leader,
    SetRoute,
    Status,
    Watch,
    encode,
    status_decoder,
)
from strata_runtime.gateway.control import ControlServer
from strata_runtime.gateway.errors import StartError
from strata_runtime.wire.transport import Keys, connect
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import Harness

KEY = "control secret"


class Controller:
    """What an operator does with the port."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self._context = zmq.asyncio.Context()
        socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self.socket = connect(socket, f"tcp://127.0.0.1:{port}", Keys.of(key))

    async def ask(self, request: Any) -> Status:
        await self.socket.send(encode(request))
        return await self.news()

    async def news(self) -> Status:
        return status_decoder.decode(await self.socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def control(gateway: Harness) -> AsyncIterator[ControlServer]:
    server = ControlServer(gateway.dispatcher, "127.0.0.1", 0, KEY)
    yield server
    await server.close()


@pytest.fixture
async def controller(control: ControlServer) -> AsyncIterator[Controller]:
    controller = Controller(control.port)
    yield controller
    controller.close()


async def test_the_status(gateway: Harness, controller: Controller) -> None:
    status = await controller.ask(GetStatus())
    assert status == GatewayStatus(
        gateway.dispatcher.incarnation, 1, 1, 0, changes=(EpochChange(1),), replicas=(0,), protocol=GATEWAY_PROTOCOL
    )


async def test_a_route_is_answered_and_its_leaders_are_news(controller: Controller, leader: FakeLeader) -> None:
    await controller.ask(Watch())
    leader.epoch = 2
    status = await controller.ask(route_to(leader))
    while status.epoch < 2 or status.leaders_connected < 1:
        status = await controller.news()
    assert status.epoch == 2


async def test_a_watcher_hears_of_a_lost_leader(controller: Controller, leader: FakeLeader) -> None:
    assert (await controller.ask(Watch())).leaders_connected == 1
    await leader.stop()
    while (await controller.news()).leaders_connected != 0:
        pass
    await leader.start()
    while (await controller.news()).leaders_connected != 1:
        pass


async def test_a_watcher_that_is_gone_disturbs_nobody(
    gateway: Harness, leader: FakeLeader, control: ControlServer, controller: Controller
) -> None:
    other = Controller(control.port)
    await other.ask(Watch())
    await controller.ask(Watch())
    other.close()
    leader.allow(0)
    running = asyncio.create_task(gateway.complete(max_tokens=1))
    assert (await controller.news()).running_requests == 1
    leader.allow(None)
    assert (await controller.news()).running_requests == 0
    await running


async def test_what_does_not_decode_is_answered_with_the_status(controller: Controller) -> None:
    await controller.socket.send(b'{"type": "setRoute", "epoch": "two"}')
    assert (await controller.news()).epoch == 1


ODD = {
    "two frames": [encode(GetStatus()), encode(GetStatus())],
    "no text": [b'{"type": "setRoute\xff"}'],
    "too deep": [b'{"type": "setRoute", "leaders": ' + b"[" * 9000],
    "nothing": [b""],
    "an address that is none": [encode(SetRoute(2, "k", (Leader(0, "s", "tcp://\0", 1.0),), 9))],
}


@pytest.mark.parametrize("case", ODD)
async def test_the_port_answers_after_an_odd_message(controller: Controller, case: str) -> None:
    await controller.socket.send_multipart(ODD[case])
    await controller.news()
    assert isinstance(await controller.ask(GetStatus()), GatewayStatus)


async def test_another_secret_gets_no_answer(control: ControlServer, controller: Controller) -> None:
    with contextlib.closing(Controller(control.port, "another secret")) as stranger:
        await stranger.socket.send(encode(GetStatus()))
        await controller.ask(GetStatus())
        assert not await stranger.socket.poll(200)


async def test_a_port_in_use(gateway: Harness, control: ControlServer) -> None:
    with pytest.raises(StartError, match=rf"--control-port {control.port}: .*free port"):
        ControlServer(gateway.dispatcher, "127.0.0.1", control.port, KEY)


async def test_a_port_that_fails_says_so(
    gateway: Harness, control: ControlServer, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> GatewayStatus:
        raise OSError("Too many open files")

    monkeypatch.setattr(gateway.dispatcher, "status", broken)
    await controller.socket.send(encode(GetStatus()))
    with pytest.raises(OSError, match="Too many open files"):
        await asyncio.wait_for(control.failed(), 10)
