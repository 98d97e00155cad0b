"""One process of a local deployment that must stay alive: a slot or the gateway, with its ports, log and history.

A service that ends is started again, later each time if it never got to serve; one that cannot stay alive is given up
with the last lines of its log. Used by the local deployment alone; knows nothing of epochs.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from strata_operator.act.control_client import Endpoint
from strata_operator.local.errors import CrashedError
from strata_operator.local.launcher import Child, Launcher
from strata_operator.local.ports import free_port, free_ports
from strata_planner.contract.control import SlotAddress

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
QUICK_ENDS = 4  # so many times in a row it may end before it has served, then it is given up
PAUSE_SECONDS = 0.5  # before the second start in a row; twice as long before each further one
LOG_LINES = 15


class Service(ABC):
    """A process that is kept alive. `control` is None while it is down; `has_served`: it was of use since its start.

    `secret`: of its control port alone.
    """

    def __init__(self, name: str, module: str, logs: Path, secret: str) -> None:
        self.name = name
        self.host = HOST  # where it listens; another one is set before the first start
        self.control: Endpoint | None = None
        self._child: Child | None = None
        self._control_port = 0
        self.has_served = False
        self.failed = 0  # so many processes in a row have ended before they served
        self.ended_at: float | None = (
            None  # when its process did last, by the monotonic clock; None: it need not come back
        )
        self._module = module
        self._log_file = logs / f"{name}.log"
        self._secret = secret
        self._killed = ""  # the last life that was ended as hung

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    async def keep_alive(self, launcher: Launcher, changed: Callable[[], None]) -> None:
        """Start it, and again whenever it ends, until cancelled. Raises CrashedError when that is of no use."""
        self.failed = 0
        while True:
            self.has_served = False
            child = await self._start(launcher, other_ports=self.failed > 1)
            changed()
            code = await asyncio.shield(child.ended)
            self.control, self.ended_at = None, time.monotonic()
            self.failed = 0 if self.has_served else self.failed + 1
            self.has_served = False
            changed()
            log.warning("%s %s; starting it again", self.name, how_it_ended(code))
            if self.failed >= QUICK_ENDS:
                raise CrashedError(
                    f"{self.name} {how_it_ended(code)}, {self.failed} times in a row before it served; "
                    f"keep its whole log with --logs FOLDER. It ends with:\n{self.last_lines()}"
                )
            await asyncio.sleep(PAUSE_SECONDS * (2 ** (self.failed - 1) - 1) if self.failed else 0)

    def kill(self) -> None:
        """End the process at once; it is started again."""
        if self._child is not None:
            self._child.kill()

    def kill_once(self, incarnation: str) -> bool:
        """The same of one life, whatever is still told of it until its end is. Whether it was not done yet."""
        if incarnation == self._killed:
            return False
        self._killed = incarnation
        self.kill()
        return True

    def last_lines(self) -> str:
        if not self._log_file.exists():
            return "(nothing)"
        return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]) or "(nothing)"

    async def _start(self, launcher: Launcher, *, other_ports: bool) -> Child:
        """At the same ports as before, so that who has prepared an epoch with them need not do it again; at others when
        it does not stay alive there.
        """
        if self._control_port == 0 or other_ports:
            self._control_port = free_port(HOST)
            self._choose_ports()
        own = {"STRATA_CONTROL_KEY": self._secret}
        child = await launcher.spawn(self._module, self._arguments(), self._log_file, own)
        self._child, self.control = child, Endpoint(self.host, self._control_port, self._secret)
        log.info("%s runs as process %d", self.name, child.pid)
        return child

    @abstractmethod
    def _choose_ports(self) -> None:
        """Those beside the control port."""

    @abstractmethod
    def _arguments(self) -> list[str]: ...


class SlotService(Service):
    """A slot with data and request ports for `roles` roles."""

    def __init__(self, name: str, module: str, logs: Path, secret: str, *, roles: int, flags: Sequence[str]) -> None:
        super().__init__(name, module, logs, secret)
        self.address: SlotAddress | None = None
        self._roles = roles
        self._flags = flags

    def _choose_ports(self) -> None:
        self.address = SlotAddress(
            host=self.host,
            control_port=self._control_port,
            data_port=free_ports(HOST, self._roles),
            request_port=free_ports(HOST, self._roles),
            pages_port=free_port(HOST),
        )

    def _arguments(self) -> list[str]:
        assert self.address is not None
        flags = ["--control-port", str(self.address.control_port)]
        return ["--name", self.name, "--host", self.host, *flags, *self._flags]


class GatewayService(Service):
    """The gateway; its HTTP port is the user's choice and stays the same."""

    def __init__(self, module: str, logs: Path, secret: str, arguments: list[str]) -> None:
        super().__init__("gateway", module, logs, secret)
        self._fixed = arguments

    def _choose_ports(self) -> None:
        """The HTTP port is fixed."""

    def _arguments(self) -> list[str]:
        return [*self._fixed, "--control-host", HOST, "--control-port", str(self._control_port)]


def how_it_ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
