"""What users notice of a drain, of a node that is back, of an operator's death, and of a loss without an API server, on the real Kubernetes of the test bed.

`python -m benchmarks.cluster_faults [--json FILE] [--moves 3] [--deaths 3] [--away 30]`, as root, some twenty minutes. One deployment of two stages on two nodes, two streams
one behind the other all the time. Pauses are the longest between two tokens: as gateways tell them (`status.replans[].pauseMs`), and as clients saw
them. A node is drained and given back, by an edit, and once with `minGain: 0`, where the operator takes it by itself. Then the operator is killed at moments all
through an epoch, and through `--deaths` losses of a node with kubelet, pods and network at once. Then a node goes so, and in the same moment the
API server stops for `--away` seconds: without standing orders, and with them. Texts are compared with that of a stream that nothing befell.
"""

import argparse
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from benchmarks.rows import Row, run
from benchmarks.two_nodes import PROMPT, deployed, give_back, inside_a_world, load, undisturbed, victims
from strata_operator.render.names import EPOCH_LABEL
from tests.cluster.deployed import Deployed, Status, stream
from tests.cluster.testbed.processes import Daemon, wait_until

TOKENS = 400
SILENCE_SECONDS = 10
STREAMS = 2
DEATHS = (0.2, 0.5, 0.8, 1.1, 1.5, 2.0, 3.0)
LOSS_DEATHS = (1.8, 2.1, 0.5)  # the plan without the node is on record after some 1.9 s
FALLS_STILL = (
    "api_away",
    "operator_dies_in_a_loss",
)  # the longest gap is that of the loss, which nobody mends meanwhile


@dataclass
class Reader:
    """One client, one stream behind the other until it is told to end. `gaps`: seconds between tokens, with the moment of the later one."""

    chat: Deployed
    ends: threading.Event = field(default_factory=threading.Event)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self) -> None:
        while not self.ends.is_set():
            try:
                self.texts.append("".join(self._pieces()))
            except Exception as error:  # noqa: BLE001  a lost request is what is counted
                self.failed.append(repr(error))

    def _pieces(self) -> Iterator[str]:
        with self.chat.client() as client:
            heard = None
            for piece in stream(client, self.chat.name, PROMPT, TOKENS):
                now = time.monotonic()
                if heard is not None:
                    self.gaps.append((now, now - heard))
                heard = now
                yield piece


@contextmanager
def reading(chat: Deployed) -> Iterator[list[Reader]]:
    readers = [Reader(chat) for _ in range(STREAMS)]
    threads = [threading.Thread(target=reader.run) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.ends.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Seen:
    """Of one change: milliseconds as gateways tell and as clients saw, beside their usual wait; seconds from what happened to the next token after the pause."""

    name: str
    told_ms: float
    seen_ms: float
    usual_ms: float
    next_token: float
    held: int
    lost: int
    equal: bool
    step: str = ""  # what it had come to when that happened

    def __str__(self) -> str:
        return (
            f"{self.name}{self.step and f' ({self.step})'}: pause {self.told_ms:.0f} ms as told, {self.seen_ms:.0f} ms as seen (usual "
            f"{self.usual_ms:.0f}), next token after {self.next_token:.2f} s, "
            f"{self.held} held, {self.lost} lost, {'text equal' if self.equal else 'TEXTS PARTED'}"
        )


def changed(chat: Deployed, name: str, reasons: set[str], happens: Callable[[], object], expected: str) -> Seen:
    """Under streams, until a plan for one of these reasons serves and gateways have told what it cost."""
    before = chat.get()["status"]["committedEpoch"]

    def told(now: Status) -> list[Status]:
        new = [each for each in now.get("replans", ()) if each["epoch"] > before and each["reason"] in reasons]
        return [each for each in new if "requestsHeld" in each] if now["phase"] == "Ready" else []

    with reading(chat) as readers:
        wait_until(lambda: all(len(reader.gaps) > 50 for reader in readers), "streams", 60)
        began = time.monotonic()
        happens()
        status = chat.wait(lambda now: bool(told(now)), f"{name}: told of", 240)
    return _seen(name, readers, began, expected, told(status)[-1])


def _seen(name: str, readers: Sequence[Reader], began: float, expected: str, replan: Status) -> Seen:
    gaps = [gap for reader in readers for gap in reader.gaps]
    usual = statistics.median(seconds for _, seconds in gaps)
    at, longest = max((gap for gap in gaps if gap[0] >= began), key=lambda gap: gap[1])
    return Seen(
        name,
        replan["pauseMs"],
        1e3 * longest,
        1e3 * usual,
        at - began,
        replan["requestsHeld"],
        replan["requestsLost"] + sum(len(reader.failed) for reader in readers),
        all(text == expected for reader in readers for text in reader.texts),
    )


def grow_back(chat: Deployed, node: str, answers: int) -> None:
    """By an edit: what a device more gives so small a model is less than `minGain`."""
    chat.cluster.kubectl("uncordon", node)
    load(chat, answers=answers)


def better_plan(chat: Deployed, drain: tuple[str, ...], node: str, expected: str) -> Seen:
    """The operator finds by itself that the node is back for a minute, and that a plan with it gains something."""
    chat.apply(replanning={"minGain": 0})
    chat.cluster.kubectl(*drain)
    chat.wait(lambda now: now["phase"] == "Ready" and now["stagesReady"] == "1/1", "without the node")
    seen = changed(chat, "better_plan", {"BetterPlan"}, partial(chat.cluster.kubectl, "uncordon", node), expected)
    chat.apply(replanning={})
    return seen


def operator_dies(chat: Deployed, after: float, expected: str) -> Seen:
    """So many seconds behind an edit: whoever comes next makes an end of the epoch, whatever it had come to."""
    concurrency = 12 - chat.manifest["spec"]["workload"]["concurrency"]  # 4 and 8 in turns
    edited = partial(load, chat, concurrency=concurrency)
    return _dies_behind(chat, "operator_dies", edited, after, "SpecChanged", expected)


def operator_dies_in_a_loss(chat: Deployed, after: float, node: str, expected: str) -> Seen:
    lost = partial(chat.cluster.kill_node, node)
    return _dies_behind(chat, "operator_dies_in_a_loss", lost, after, "NodeLost", expected)


def _dies_behind(
    chat: Deployed, name: str, first: Callable[[], object], after: float, reason: str, expected: str
) -> Seen:
    """Without a chance to give up its lease."""
    before, reached = chat.get()["status"]["committedEpoch"], list[str]()

    def happens() -> None:
        began = time.monotonic()
        first()
        time.sleep(max(0.0, began + after - time.monotonic()))
        for process in psutil.process_iter(["cmdline"]):
            if "strata_operator.cli" in (process.info["cmdline"] or ()):
                process.kill()
        reached.append(_reached(chat, before))
        chat.operator.kill()  # a new pod, where a container would be put off longer each time

    seen = changed(chat, name, {reason}, happens, expected)
    return replace(seen, step=f"{after:g} s behind it, {reached[0]}")


def _reached(chat: Deployed, before: int) -> str:
    """How far the epoch behind this one had come."""
    if chat.get()["status"]["committedEpoch"] > before:
        return "its epoch in force"
    records = chat.cluster.get("configmaps", f"--namespace={chat.namespace}")["items"]
    numbers = [int((each["metadata"].get("labels") or {}).get(EPOCH_LABEL, 0)) for each in records]
    return "its epoch on record" if max(numbers, default=0) > before else "not planned yet"


def without_api(chat: Deployed, name: str, node: str, seconds: float, expected: str) -> Seen:
    """A node is lost, and in the same moment the API server stops for so long."""
    pid = Daemon("kube-apiserver", chat.cluster.directory).pid
    assert pid is not None
    back = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))

    def happens() -> None:
        os.kill(pid, signal.SIGSTOP)
        back.start()
        chat.cluster.kill_node(node)
        back.join()

    return changed(chat, name, {"NodeLost", "StandingOrder"}, happens, expected)


def measured(moves: int, deaths: int, away: float) -> list[Seen]:
    """In a world that is up."""
    chat = deployed("faults")
    expected = undisturbed(chat, TOKENS)
    seen: list[Seen] = []

    def note(found: Seen) -> None:
        print(found, flush=True)
        seen.append(found)

    for number in range(moves):
        _, node = victims(chat)[0]
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
        note(changed(chat, "drain", {"Drain"}, partial(chat.cluster.kubectl, *drain), expected))
        note(changed(chat, "grow_back", {"SpecChanged"}, partial(grow_back, chat, node, 32 + number), expected))
        if number == moves - 1:
            note(better_plan(chat, drain, node, expected))
    for after in DEATHS if deaths else ():
        note(operator_dies(chat, after, expected))
    for number, after in enumerate(LOSS_DEATHS[:deaths]):
        _, node = victims(chat)[0]
        note(operator_dies_in_a_loss(chat, after, node, expected))
        give_back(chat, node, 80 + number)
    for number, orders in enumerate((False, True) if away else ()):
        if orders:
            chat.apply(replanning={"takeover": {"standingOrders": {"silenceSeconds": SILENCE_SECONDS}}})
            wait_until(
                lambda: "standing orders" in "".join(chat.logs(pod) for pod in chat.pods("gateway")), "orders", 120
            )
        _, node = victims(chat)[0]
        note(without_api(chat, f"api_away{'_with_orders' * orders}", node, away, expected))
        give_back(chat, node, 65 + number)
    return seen


def rows_of(seen: Sequence[Seen]) -> list[Row]:
    return [
        row
        for name in dict.fromkeys(each.name for each in seen)
        for row in _rows(name, [each for each in seen if each.name == name])
    ]


def _rows(name: str, seen: Sequence[Seen]) -> list[Row]:
    """Of so many changes of one kind. The goal is for what the change costs; what clients saw has what else the machine did meanwhile, a new pod's start say."""
    told = [each.told_ms for each in seen]
    usual = statistics.median(each.usual_ms for each in seen)
    goal = 100.0 if name in {"drain", "grow_back"} else None
    rows = [
        Row(
            f"cluster_{name}_pause_ms",
            statistics.median(told),
            f"ms as gateways tell it, of {len(seen)}, median",
            goal=goal,
            lower_is_better=True,
        ),
        Row(f"cluster_{name}_pause_ms_worst", max(told), f"ms, of {len(seen)}"),
        Row(
            f"cluster_{name}_seen_ms",
            statistics.median(each.seen_ms for each in seen),
            f"ms between two tokens at a client, usually {usual:.0f}",
        ),
        Row(f"cluster_{name}_lost", sum(each.lost for each in seen), "requests", goal=0, lower_is_better=True),
        Row(
            f"cluster_{name}_equal",
            min(float(each.equal) for each in seen),
            "1: all texts are as undisturbed",
            goal=1.0,
        ),
    ]
    if name.startswith(FALLS_STILL):  # elsewhere the longest gap may be another one than the change's
        rows.append(
            Row(f"cluster_{name}_next_token", statistics.median(each.next_token for each in seen), "s from the kill")
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_faults", add_help=False)
    parser.add_argument("--moves", type=int, default=3)
    parser.add_argument(
        "--deaths", type=int, default=3, help="of the operator, each in a loss; 0: none behind edits either"
    )
    parser.add_argument("--away", type=float, default=30.0)
    chosen, rest = parser.parse_known_args(arguments)
    inside_a_world("benchmarks.cluster_faults", arguments)
    run("cluster_faults", lambda: rows_of(measured(chosen.moves, chosen.deaths, chosen.away)), rest)


if __name__ == "__main__":
    main()
