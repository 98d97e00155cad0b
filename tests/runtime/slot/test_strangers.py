"""Who knows no secret changes nothing at a running pipeline, whatever it says at whichever port."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from strata_planner.contract.control import GetStatus, SlotAddress, SlotStatus
from strata_planner.contract.keys import slot_secret
from strata_runtime.wire.client import LeaderClient, greedy
from strata_runtime.wire.transport import Keys
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import CONTROL_KEY, PipelineHarness
from tests.runtime.slot.strangers import PROBES, speaks_curve

NAMES = ["s0", "s1"]
PORTS: dict[str, Callable[[SlotAddress], int]] = {
    "data": lambda address: address.data_port,
    "control": lambda address: address.control_port,
    "requests": lambda address: address.request_port,
}

Served = tuple[PipelineHarness, LeaderClient]


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Served]:
    with PipelineHarness(NAMES) as pipeline:
        yield pipeline, pipeline.serve(even_plan(tiny_llama, NAMES))


def seen_after_this(pipeline: PipelineHarness, name: str) -> SlotStatus:
    """The first question may be answered before the slot has looked at its links; the second never is."""
    pipeline.slots[name].ask(GetStatus())
    return pipeline.slots[name].ask(GetStatus())


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("probe", PROBES)
def test_a_stranger_ends_no_epoch(served: Served, probe: str, port: str) -> None:
    pipeline, leader = served
    for name in NAMES:
        address = pipeline.slots[name].address
        if port != "requests" or name == "s0":  # the leader's alone
            PROBES[probe](PORTS[port](address))
            PROBES["noise"](PORTS[port](address))  # it was heard out, so who came before was, too
    tokens = leader.generate([greedy(f"{probe} at {port}", [1, 2, 3], 2)])
    assert len(tokens[f"{probe} at {port}"]) == 2
    for name in NAMES:
        status = seen_after_this(pipeline, name)
        assert (status.lost_peers, status.failure, status.committed_epoch) == ((), "", pipeline.epoch)


@pytest.mark.parametrize("port", PORTS)
def test_every_port_listens_where_the_slot_was_told_to(served: Served, port: str) -> None:
    """Slots of the tests were told 127.0.0.1, and not its neighbour."""
    pipeline, _ = served
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", PORTS[port](pipeline.slots["s0"].address)), timeout=10).close()


def test_no_process_speaks_in_anothers_place(served: Served) -> None:
    """Even with the public key of the port that it knocks at: its own secrets open its own connections."""
    pipeline, _ = served
    running = pipeline.threads["s0"].slot._running
    assert running is not None
    (role,), address = running.roles, pipeline.slots["s0"].address
    stage, gateway = Keys.of(role.keys.own), Keys.of(role.request_key)
    control, other_slot = Keys.of(CONTROL_KEY), Keys.of(slot_secret(CONTROL_KEY, "s1"))
    for port, keys, who, kind in (
        (address.data_port, stage, gateway, zmq.PUSH),
        (address.request_port, gateway, stage, zmq.DEALER),
        (address.control_port, control, other_slot, zmq.DEALER),
        (address.control_port, control, stage, zmq.DEALER),
    ):
        speaks_curve(port, keys.server_public, (who.client_public, who.client_secret), kind)
