"""What is attacked and what an attack saw: values that pass between the benchmark and the process that attacks."""

from collections import Counter
from dataclasses import dataclass, field

HOST = "127.0.0.1"
ROWS = 4096  # of the attacked model's embedding
BEYOND = "<|beyond|>"  # a token that its tokenizer knows all the same
SENTINEL = "xyzzy-plugh-4711"  # in every prompt of an attack: no log may hold it


@dataclass(frozen=True)
class Target:
    """Ports of one deployment, the secrets of its control ports, and the model that it serves."""

    model: str
    http_port: int
    gateway_control: int
    slot_controls: tuple[int, ...]
    inner_ports: tuple[int, ...]  # slots' data and request ports: what a stranger cannot tell apart
    addresses: dict[int, str]  # port -> the address that it is bound to
    secrets: dict[int, str]  # control port -> what opens it

    @property
    def control_ports(self) -> tuple[int, ...]:
        return (*self.slot_controls, self.gateway_control)


@dataclass
class Outcome:
    """What came of some attacks. `complaints`: each names the probe and what it saw that should not be."""

    attacks: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # status code or what happened instead -> how often
    complaints: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.attacks += other.attacks
        self.answers.update(other.answers)
        self.complaints += other.complaints

    @property
    def server_errors(self) -> int:
        """Answers of 5xx. 503 is one: nothing that is sent here may make a deployment unavailable."""
        return sum(count for answer, count in self.answers.items() if answer.startswith("5"))
