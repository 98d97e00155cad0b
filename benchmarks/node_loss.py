"""A node that is lost under a running stream, on the real Kubernetes of the test bed: from its last packet to the stream's next token, and where the seconds go.

`python -m benchmarks.node_loss [--json FILE] [--losses 6] [--quick]`, as root, two minutes and a half minute for each loss. A node goes with kubelet, pods and network
at once (`tests/cluster`); its stage of two leads or is the last one, in turn, and the other takes over. Moments are the operator's (`status.replans`), on the same
clock. Texts are compared with that of a stream that nothing befell.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks.rows import Row, run
from benchmarks.two_nodes import PROMPT, deployed, give_back, inside_a_world, undisturbed, victims
from tests.cluster.deployed import Deployed, Status, stream

GOAL_SECONDS = 2.5
STEPS = ("noticed", "planned", "prepared", "committed")
TOKENS = 160


@dataclass(frozen=True)
class Loss:
    """Seconds after the kill; `text`: of the stream that it befell. `kind`: of the repair."""

    stage: int
    steps: dict[str, float]
    next_token: float
    kind: str
    text: str

    def __str__(self) -> str:
        told = ", ".join(f"{step} {seconds:.2f}" for step, seconds in self.steps.items())
        return f"stage {self.stage} lost: {told}, next token {self.next_token:.2f} s ({self.kind})"


def lose(chat: Deployed, stage: int, node: str) -> Loss:
    """Under a stream; returns when all serves again without the node, which stays away."""
    with chat.client() as client:
        pieces = stream(client, chat.name, PROMPT, TOKENS)
        text = next(pieces) + next(pieces)
        began, killed = time.monotonic(), datetime.now(UTC)
        chat.cluster.kill_node(node)
        heard, longest, goes_on = began, 0.0, 0.0
        for piece in pieces:  # what was on its way still comes: the longest silence is the loss
            text, now = text + piece, time.monotonic()
            if now - heard > longest:
                longest, goes_on = now - heard, now - began
            heard = now
    replans = chat.wait(_is_repaired(node), "Ready without the node")["replans"]
    replan = next(each for each in reversed(replans) if each["reason"] == "NodeLost")
    at = {step: datetime.fromisoformat(replan[f"{step}At"]) for step in STEPS}
    seconds = {step: (moment - killed).total_seconds() for step, moment in at.items()}
    return Loss(stage, seconds, goes_on, (replan.get("repair") or {}).get("kind", "planned anew"), text)


def _is_repaired(node: str) -> Callable[[Status], bool]:
    def repaired(status: Status) -> bool:
        return status["phase"] == "Ready" and node not in {stage["node"] for stage in status["stages"]}

    return repaired


def measured(losses: int) -> list[Loss]:
    """In a world that is up."""
    chat = deployed("node-loss")
    found = []
    for number in range(losses):
        stage, node = victims(chat)[number % len(victims(chat))]
        loss = lose(chat, stage, node)
        print(loss, flush=True)
        found.append(loss)
        if number + 1 < losses:
            give_back(chat, node, 65 + number)
    expected = undisturbed(chat, TOKENS)
    wrong = [loss for loss in found if loss.text != expected]
    if wrong:
        raise SystemExit(f"texts parted: {[loss.stage for loss in wrong]}")
    return found


def rows_of(found: Sequence[Loss]) -> list[Row]:
    seconds = [loss.next_token for loss in found]
    unit = f"s from the kill, of {len(found)} losses"
    return [
        *(Row(f"node_loss_{step}", statistics.median(loss.steps[step] for loss in found), unit) for step in STEPS),
        Row("node_loss_seconds", statistics.median(seconds), unit, goal=GOAL_SECONDS, lower_is_better=True),
        Row("node_loss_seconds_worst", max(seconds), unit),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.node_loss", add_help=False)
    parser.add_argument("--losses", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one loss")
    chosen, rest = parser.parse_known_args(arguments)
    inside_a_world("benchmarks.node_loss", arguments)
    run("node_loss", lambda: rows_of(measured(1 if chosen.quick else chosen.losses)), rest)


if __name__ == "__main__":
    main()
