"""Vital signs of a deployment's processes: who has died, how much memory each has taken, which epoch is in force.

Looked at around every attack, so that what changed is put down to it.
"""

from dataclasses import dataclass, field

import psutil

from benchmarks.attack.keys import ask_status
from benchmarks.attack.target import Target
from benchmarks.deployment import Deployment, listening
from benchmarks.memory import Mark
from strata_planner.contract.control import SlotStatus
from strata_planner.contract.keys import gateway_secret

_SLOT_PATIENCE_SECONDS = 10.0


@dataclass
class Vitals:
    """The signs of one deployment. `grown`: the highest memory of each process over what it had at first."""

    deployment: Deployment
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)
    _epoch: int = 0

    def begin(self) -> None:
        """What is seen from now on counts."""
        self.processes = self.deployment.await_processes()
        self._first = {name: _private(process) for name, process in self.processes.items()}
        self._epoch = self.epoch()
        self.mark()

    def mark(self) -> None:
        """The kernel's marks of the most memory begin anew."""
        for process in self.processes.values():
            if process.is_running():
                Mark(process.pid).reset()

    def epoch(self) -> int:
        """The highest that a slot has committed."""
        record = self.deployment.record
        statuses = [
            ask_status(port, record.control_keys[slot], _SLOT_PATIENCE_SECONDS)
            for slot, port in record.control_ports.items()
        ]
        return max((status.committed_epoch for status in statuses if isinstance(status, SlotStatus)), default=0)

    def deaths(self) -> list[str]:
        """Names of those that have ended since the last look; their successors are looked at from now on."""
        dead = [name for name, process in self.processes.items() if not process.is_running()]
        if dead:
            self.processes = self.deployment.await_processes()
            self._first.update({name: _private(self.processes[name]) for name in dead})
        return dead

    def epochs(self) -> int:
        """How many there were since the last look."""
        before, self._epoch = self._epoch, max(self._epoch, self.epoch())
        return self._epoch - before

    def growth(self) -> dict[str, int]:
        """The most bytes of each process since the last `mark`, beyond those of `begin`."""
        found = {}
        for name, process in self.processes.items():
            if process.is_running():
                found[name] = max(0, Mark(process.pid).private_bytes - self._first[name])
                self.grown[name] = max(self.grown.get(name, 0), found[name])
        return found


def target_of(deployment: Deployment, model: str) -> Target:
    record, processes = deployment.record, deployment.await_processes()
    ports = {name: listening(process) for name, process in processes.items()}
    slots = record.control_ports
    (gateway_control,) = set(ports["gateway"]) - {deployment.port}
    return Target(
        model=model,
        http_port=deployment.port,
        gateway_control=gateway_control,
        slot_controls=tuple(slots.values()),
        inner_ports=tuple(port for name in slots for port in ports[name] if port != slots[name]),
        addresses={port: address for each in ports.values() for port, address in each.items()},
        secrets={
            **{port: record.control_keys[slot] for slot, port in slots.items()},
            gateway_control: gateway_secret(deployment.control_secret),
        },
    )


def _private(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - memory.shared)
