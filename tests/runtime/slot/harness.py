"""A pipeline of real slots in threads of this process, over loopback."""

import itertools
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, SlotAddress
from strata_runtime.slot import epoch
from strata_runtime.slot.memory import MemoryMeter
from strata_runtime.slot.slot import Slot, SlotOptions
from strata_runtime.wire.client import PipelineClient, SlotClient

CONTROL_KEY = "control secret of the tests"
epoch._give_up = lambda _: (
    None
)  # slots are threads here: who gives up would end the process of all tests, and leave their runner waiting


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to outgoing connections, each worker of the tests its own: nobody else takes one between here and its use. The next
    ones belong to it, for further roles of a slot.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = next(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def _ports_of_this_worker() -> range:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = (HIGHEST_PORT - LOWEST_PORT) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = LOWEST_PORT + worker * share
    return range(first, first + share - ROLES, ROLES)


LOWEST_PORT, HIGHEST_PORT = 10_000, 20_000  # `strata up` begins above
ROLES = 8  # of a slot, at most
_PORTS = itertools.cycle(_ports_of_this_worker())


class SlotThread(SlotClient):
    """One slot, with its controller's connection."""

    def __init__(
        self, name: str, address: SlotAddress | None = None, step_timeout: float = STEP_TIMEOUT_SECONDS
    ) -> None:
        ports = free_ports(4)
        address = address or SlotAddress(
            host="127.0.0.1", control_port=ports[0], data_port=ports[1], request_port=ports[2], pages_port=ports[3]
        )
        self.slot = Slot(
            SlotOptions(name, "127.0.0.1", address.control_port, CONTROL_KEY, 1, step_timeout=step_timeout)
        )
        idle = self.slot._idle_bytes
        self.slot._memory = MemoryMeter(lambda: idle)  # the kernel takes 10 ms to say what all of the tests hold
        self._thread = threading.Thread(target=self.slot.run, name=name)
        self._thread.start()
        super().__init__(name, address, CONTROL_KEY)

    def close(self) -> None:
        self.slot.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()
        super().close()


class PipelineHarness(PipelineClient):
    """Slots that can be lost; use as a context manager."""

    def __init__(self, names: Sequence[str], step_timeout: float = STEP_TIMEOUT_SECONDS) -> None:
        self.threads = {name: SlotThread(name, step_timeout=step_timeout) for name in names}
        super().__init__(self.threads)

    def restart(self, name: str) -> None:
        """The slot's process is gone and a new one, without roles, has its address."""
        address = self.threads[name].address
        self.threads[name].close()
        self.threads[name] = self.slots[name] = SlotThread(name, address)
