"""The control client against a real socket: questions, watches, silence, another process at the same port, wrong keys."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import pytest
import zmq
import zmq.asyncio

from strata_operator.act import control_client
from strata_operator.act.control_client import (
    BitsKeptError,
    Control,
    Endpoint,
    Links,
    NoAnswerError,
    ask,
    set_bits,
    watch,
)
from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.control import (
    GatewayStatus,
    GetStatus,
    Prepare,
    SetBits,
    SlotStatus,
    Status,
    SwitchState,
    Watch,
    encode,
    slot_request_decoder,
)
from strata_planner.contract.keys import curve_secret_key
from strata_planner.contract.roles import roles_of
from tests.operator.fakes import FakeSlot, a_plan, addresses_of

SECRET = "a control key"
SLOT_PROCESS = "import sys; from tests.operator.fake_slot_process import main; main(sys.argv[1:])"


class Served:
    """A fake slot on a ROUTER socket of its own."""

    def __init__(self, slot: FakeSlot, port: int = 0) -> None:
        self.slot = slot
        self.watchers: set[bytes] = set()
        self.before: list[bytes] = []  # frames that it sends before each answer
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = curve_secret_key(SECRET, "server")
        self.port = int(self._socket.bind(f"tcp://127.0.0.1:{port or '*'}").addr.rsplit(":", 1)[1])
        self._task = asyncio.create_task(self._serve())

    async def tell(self) -> None:
        for identity in self.watchers:
            await self._socket.send_multipart([identity, encode(self.slot.status())])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            identity, payload = await self._socket.recv_multipart()
            request = slot_request_decoder.decode(payload)
            if isinstance(request, Watch):
                self.watchers.add(identity)
            if self.before:
                await self._socket.send_multipart([identity, *self.before])
            await self._socket.send_multipart([identity, encode(self.slot.handle(request))])


@asynccontextmanager
async def serving(slot: FakeSlot, port: int = 0) -> AsyncIterator[Served]:
    served = Served(slot, port)
    try:
        yield served
    finally:
        await served.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def at(port: int, secret: str = SECRET) -> Endpoint:
    return Endpoint("127.0.0.1", port, secret)


async def test_every_question_is_answered_by_a_whole_status() -> None:
    plan = a_plan("a", "b")
    prepare = Prepare(epoch=3, key="k", roles=roles_of(plan)["a"], slots=addresses_of("a", "b"))
    async with serving(FakeSlot("a")) as served:
        assert (await ask(at(served.port), GetStatus())).incarnation == served.slot.incarnation
        status = await ask(at(served.port), prepare)
    assert isinstance(status, SlotStatus)
    assert (status.prepare.epoch, status.prepare.phase, status.prepare.layers_total) == (3, "loading", 2)


async def test_silence_is_an_error_that_names_the_address() -> None:
    with pytest.raises(NoAnswerError, match=r"no answer from 127\.0\.0\.1:1 in 0\.2 s"):
        await ask(at(1), GetStatus(), timeout_seconds=0.2)


async def test_another_control_key_gets_no_answer() -> None:
    async with serving(FakeSlot("a")) as served:
        with pytest.raises(NoAnswerError):
            await ask(at(served.port, "another key"), GetStatus(), timeout_seconds=0.3)


@pytest.mark.parametrize(
    "odd", [[b"{", b"}"], [b'{"type": "slot\xff"}'], [b""]], ids=["two frames", "no text", "nothing"]
)
async def test_what_is_no_status_is_passed_over(odd: list[bytes]) -> None:
    async with serving(FakeSlot("a")) as served:
        served.before = odd
        assert isinstance(await ask(at(served.port), GetStatus()), SlotStatus)


async def test_a_watch_tells_every_change_and_finds_the_next_process_at_the_same_port() -> None:
    statuses: asyncio.Queue[SlotStatus] = asyncio.Queue()

    async def collect(port: int) -> None:
        async for status in watch(at(port)):
            if isinstance(status, SlotStatus):
                await statuses.put(status)

    async with serving(FakeSlot("a")) as first:
        port = first.port
        task = asyncio.create_task(collect(port))
        assert (await statuses.get()).failure == ""
        first.slot.failure = "out of memory"
        await first.tell()
        assert (await statuses.get()).failure == "out of memory"
    async with serving(FakeSlot("a"), port) as second:
        while (await statuses.get()).incarnation != second.slot.incarnation:
            pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class SlowSlot(FakeSlot):
    """Switches when it is told to."""

    def _switch(self, request: SetBits) -> SwitchState:
        return SwitchState(request, "waiting")


BITS = SetBits(epoch=3, replica=0, stage=0, bits={1: 4})


async def test_setting_bits_returns_when_all_layers_have_them() -> None:
    slot, seen = SlowSlot("a"), list[str]()
    async with serving(slot) as served:
        asked = asyncio.create_task(set_bits(at(served.port), BITS, lambda state: seen.append(state.phase)))
        while not served.watchers:  # noqa: ASYNC110  it listens a moment after it has asked
            await asyncio.sleep(0.01)
        for phase in ("switching", "switched"):
            slot.switches = (SwitchState(BITS, phase),)
            await served.tell()
        assert (await asked).request == BITS
    assert seen[0] == "waiting"
    assert seen[-1] == "switched"


async def test_bits_that_are_kept_are_an_error_with_the_slots_reason() -> None:
    slot = FakeSlot("a")
    slot.refuses = "layer 1 is stored in int4"
    async with serving(slot) as served:
        with pytest.raises(BitsKeptError, match="layer 1 is stored in int4") as kept:
            await set_bits(at(served.port), BITS)
    assert kept.value.state.request == BITS


async def test_a_slot_that_is_started_anew_while_bits_move_is_told_so() -> None:
    slot = SlowSlot("a")
    async with serving(slot) as served:
        asked = asyncio.create_task(set_bits(at(served.port), BITS))
        while not served.watchers:  # noqa: ASYNC110  as above
            await asyncio.sleep(0.01)
        slot.restart()
        with pytest.raises(NoAnswerError, match="started anew"):
            await asked


async def test_links_hold_only_who_answers() -> None:
    changed = asyncio.Event()
    links = Links(changed.set)

    async def until(present: bool) -> None:  # noqa: FBT001  reads as a sentence
        while ("a" in links.statuses) != present:
            changed.clear()
            await changed.wait()

    async with serving(FakeSlot("a")) as served:
        links.follow({"a": at(served.port)})
        await until(present=True)
    await until(present=False)
    await links.close()


class Wire:
    """A connection that can be cut: what goes to its port goes on to another."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, onward = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, onward]
        await asyncio.gather(self._copy(reader, onward), self._copy(behind, writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)


async def test_a_process_that_is_stopped_is_away_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port goes on to take connections, and never answers one."""
    monkeypatch.setattr(control_client, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(control_client, "HEART_STOPPED_SECONDS", 0.1)
    for name in ("SILENCE_SECONDS", "BROKEN_SECONDS"):
        monkeypatch.setattr(control_client, name, 0.1)
    port = free_port()
    command = [sys.executable, "-c", SLOT_PROCESS, "--name", "a", "--control-port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "STRATA_CONTROL_KEY": SECRET})
    changed = asyncio.Event()
    links = Links(changed.set)
    try:
        links.follow({"a": at(port)})
        for sent, answers in ((signal.SIGCONT, True), (signal.SIGSTOP, False), (signal.SIGCONT, True)):
            process.send_signal(sent)
            while ("a" in links.statuses) != answers:
                changed.clear()
                await changed.wait()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
    finally:
        await links.close()
        process.kill()
        await process.wait()


@pytest.fixture
def _never_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does silence alone count."""
    for name in ("ASK_AGAIN_SECONDS", "ASK_SELDOM_SECONDS", "SILENCE_SECONDS"):
        monkeypatch.setattr(control_client, name, 1000.0)


@pytest.mark.usefixtures("_never_asks_again")
async def test_a_process_that_ends_is_missed_by_its_connection_alone() -> None:
    told = watch(at((served := Served(FakeSlot("a"))).port))
    assert await anext(told) is not None
    await served.close()
    async with asyncio.timeout(10):
        assert await anext(told) is None
    await told.aclose()


@pytest.mark.usefixtures("_never_asks_again")
async def test_a_connection_that_comes_again_is_no_loss_and_hears_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "BROKEN_SECONDS", 1000.0)
    async with serving(FakeSlot("a")) as served, Wire(served.port) as wire:
        told = watch(at(wire.port))
        assert await anext(told) is not None
        wire.cut()
        assert await anext(told) is not None  # it has asked to be told again, as another one
        served.slot.failure = "out of memory"
        await served.tell()
        status = await anext(told)
        assert isinstance(status, SlotStatus)
        assert status.failure == "out of memory"
        await told.aclose()


@pytest.mark.slow  # waits for seconds; test_controller.py has looks that grow rare, by virtual time
async def test_who_says_the_same_is_asked_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "ASK_AGAIN_SECONDS", 0.01)
    async with serving(FakeSlot("a")) as served:
        times: list[float] = []
        told = watch(at(served.port))
        async with asyncio.timeout(60):
            while len(times) < 20:
                assert await anext(told) is not None
                times.append(asyncio.get_running_loop().time())
        await told.aclose()
        first, last = times[5] - times[0], times[-1] - times[-6]
        assert last > 2 * first  # a quarter more of all the time so far, each


async def test_only_what_changes_wakes() -> None:
    """All are asked twice a second, and a controller looks at its whole cluster when it is woken."""
    one, other = FakeSlot("a").status(), FakeSlot("a").status()
    assert one.incarnation != other.incarnation
    told, all_told = [one, one, None, None, one, one, other, other], asyncio.Event()

    async def tell(_: Endpoint, __: Callable[[], None]) -> AsyncGenerator[Status | None]:
        for status in told:
            yield status
        all_told.set()
        await asyncio.Event().wait()

    woken: list[Status | None] = []
    links = Links(lambda: woken.append(links.statuses.get("a")), Control(watch=tell))
    links.follow({"a": at(1)})
    await all_told.wait()
    await links.close()
    assert woken == [one, None, one, other]


async def test_counts_of_drafts_are_kept_and_wake_nobody() -> None:
    counted = [GatewayStatus("one", 1, 1, 0, DraftCounts(each, each, each, each)) for each in (1, 2)]
    all_told = asyncio.Event()

    async def tell(_: Endpoint, __: Callable[[], None]) -> AsyncGenerator[Status | None]:
        for status in counted:
            yield status
        all_told.set()
        await asyncio.Event().wait()

    woken: list[Status | None] = []
    links = Links(lambda: woken.append(links.statuses.get("gateway")), Control(watch=tell))
    links.follow({"gateway": at(1)})
    await all_told.wait()
    assert links.statuses["gateway"] == counted[-1]
    await links.close()
    assert woken == counted[:1]


async def test_what_links_send_comes_back_as_the_new_status() -> None:
    links = Links(lambda: None)
    async with serving(FakeSlot("a")) as served:
        links.follow({"a": at(served.port)})
        roles = roles_of(a_plan("a"))["a"]
        await links.send("a", Prepare(epoch=1, key="k", roles=roles, slots=addresses_of("a")))
        status = links.statuses["a"]
        await links.send("nobody", GetStatus())
    await links.close()
    assert isinstance(status, SlotStatus)
    assert status.prepare.epoch == 1


async def test_an_accused_process_is_asked_and_its_silence_ends_its_status() -> None:
    changed = asyncio.Event()
    links = Links(changed.set)
    async with serving(FakeSlot("a")) as alive:
        async with serving(FakeSlot("b")) as dying:
            links.follow({"a": at(alive.port), "b": at(dying.port)})
            while set(links.statuses) != {"a", "b"}:
                changed.clear()
                await changed.wait()
            assert await links.all_answer(["a", "b"])
            assert not await links.all_answer(["a", "b", "c"])  # it has ended since it was last looked at
        assert not await links.all_answer(["a", "b"], timeout_seconds=0.3)
        assert set(links.statuses) == {"a"}
        await links.close()
