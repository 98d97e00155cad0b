"""A running deployment of two stages is attacked: nothing may end, pause, grow or change its epoch.

`python -m benchmarks.hostile [--quick] [--seed N] [--only NAME,...] [--json FILE]`. Attackers work in a process of their own, at low
priority; a normal stream runs beside them and its longest gap counts. What an attack did is printed as it is seen, with the
command that repeats it.
"""

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.attack import control_frames, held, http_probes, http_send, insiders, port_probes, port_send
from benchmarks.attack.beside import Beside
from benchmarks.attack.target import BEYOND, ROWS, SENTINEL, Outcome, Target
from benchmarks.attack.vitals import Vitals, target_of
from benchmarks.deployment import NAME, Deployment, Wishes, deployed
from benchmarks.rows import Row, run

MODEL = Path("examples/models/strata-tiny").resolve()
CHUNK = 500  # attacks between two looks
INSIDER_CHUNK = 100  # each of them may cost an epoch
MOST_GROWTH_BYTES = 50_000_000
LONGEST_PAUSE_SECONDS = 1.0
ATTACK_SECONDS = 900.0  # then the attacker itself is taken to hang
SETTLE_SECONDS = 10.0  # for the stream beside to go on after an attack
NICENESS = 10
OPEN_FILES = 1024  # what a process may open by default on most systems: fewer than connections are held
FLOOD_SECONDS = 20.0
MOST_LOG_BYTES = 20_000_000  # of each: what strangers do must not fill a disk
OWN_KILLS = "our own kills"
RECOVERY_SECONDS = 60.0

Attack = Callable[[Target], Outcome]


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    requests: int = 10_000
    frames: int = 7_600  # of strangers
    control_frames: int = 2_000  # of who holds the control secret
    insider_frames: int = 400  # of who holds an epoch's key
    connections: int = 3_000
    held_seconds: float = 75.0
    silent_seconds: float = 45.0


QUICK = Scale(500, 500, 200, 60, 400, 75.0, 35.0)


@dataclass
class Findings:
    """What all attacks did."""

    outcome: Outcome = field(default_factory=Outcome)
    crashes: int = 0
    epochs: int = 0
    requests: int = 0
    frames: int = 0


def attacks(scale: Scale, seed: int) -> Iterator[tuple[str, Attack]]:
    """All attacks on the deployment, by name, in their order."""
    for name, probe in (*port_probes.PROBES.items(), *http_probes.PROBES.items()):
        yield name, partial(_probed, probe)
    yield "silent", partial(_probed, partial(port_probes.silent, connections=300, seconds=scale.silent_seconds))
    yield "held", partial(_probed, partial(held.hold, connections=scale.connections, seconds=scale.held_seconds))
    for name, fuzz, count in (
        ("http", http_send.fuzz, scale.requests),
        ("frames", port_send.fuzz, scale.frames),
        ("control", control_frames.fuzz, scale.control_frames),
    ):
        for first in range(0, count, CHUNK):
            some = min(CHUNK, count - first)
            yield f"{name}/{first}", partial(fuzz, seed=seed, first=first, count=some)


def make_model(folder: Path) -> Path:
    """strata-tiny with a tokenizer that knows a token more than the model has rows for, as fine-tunes do."""
    model = folder / "model"
    shutil.copytree(MODEL, model)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": ROWS, "content": BEYOND})
    path.write_text(json.dumps(tokenizer))
    return model


class Siege:
    """One deployment under attack."""

    def __init__(self, deployment: Deployment, beside: Beside, attacker: ProcessPoolExecutor) -> None:
        self.findings = Findings()
        self._deployment = deployment
        self._beside = beside
        self._attacker = attacker
        self.vitals = Vitals(deployment)
        self._target = target_of(deployment, NAME)
        attacker.submit(int).result()  # it imports what it needs
        self._warm_up()
        self.vitals.begin()

    def attack(self, name: str, attack: Attack) -> None:
        """Run one, look, say what it did."""
        self._beside.during = name
        self.vitals.mark()
        started = time.monotonic()
        try:
            outcome = self._attacker.submit(attack, self._target).result(ATTACK_SECONDS)
        except Exception as error:  # noqa: BLE001  what an attacker meets is a finding, never the benchmark's end
            outcome = Outcome(attacks=1, complaints=[f"the attack did not end well: {type(error).__name__} {error}"])
        self._beside.settle(SETTLE_SECONDS)
        deaths, epochs = self.vitals.deaths(), self.vitals.epochs()
        grown = self.vitals.growth()
        if deaths:
            self._target = target_of(self._deployment, NAME)
        kind = name.partition("/")[0]
        self.findings.requests += outcome.attacks if kind == "http" else 0
        self.findings.frames += outcome.attacks if kind in {"frames", "control", "insiders"} else 0
        self.findings.outcome.add(outcome)
        self.findings.crashes += len(deaths)
        self.findings.epochs += epochs
        seen = [f"ended: {', '.join(deaths)}"] if deaths else []
        seen += [f"{epochs} new epochs"] if epochs else []
        seen += [f"{each} grew by {size / 1e6:.0f} MB" for each, size in grown.items() if size > MOST_GROWTH_BYTES]
        if (gap := self._beside.longest_gaps[name]) > LONGEST_PAUSE_SECONDS:
            seen.append(f"the stream beside paused for {gap:.1f} s")
        worst = max(grown.values(), default=0) / 1e6
        took = time.monotonic() - started
        print(
            f"{name}: {took:.1f} s, gap {gap:.2f} s, growth {worst:.0f} MB, {dict(outcome.answers) or 'probed'}",
            flush=True,
        )
        for line in (*seen, *outcome.complaints[:20]):
            print(f"    ! {line}  (python -m benchmarks.hostile --only {name})", flush=True)

    def flood(self) -> "Future[list[str]]":
        """Connections are held from now on for a while, more than the gateway may open files."""
        flood = partial(held.hold, connections=2 * OPEN_FILES, seconds=FLOOD_SECONDS)
        return self._attacker.submit(flood, self._target)

    def _warm_up(self) -> None:
        """What a first full batch allocates is no growth."""
        ask = partial(http_send.text, self._target.http_port, NAME, tokens=60)
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(ask, [f"def {'a ' * length}" for length in range(16)]))
        http_send.fuzz(self._target, seed=-1, first=0, count=50)


def aftermath(siege: Siege, beside: Beside, deployment: Deployment) -> list[str]:
    """Whether all is as before: the same text now and in the epochs after this one, and no prompt in a log.

    Two slots die, of us and not of a stranger: what lies poisoned in the journal is replayed then, and a gateway whose
    files are used up by strangers' connections needs new ones.
    """
    beside.during = OWN_KILLS
    complaints = [f"afterwards: {wrong}"] if (wrong := beside.again()) else []
    flood = siege.flood()
    time.sleep(FLOOD_SECONDS / 4)
    deployment.kill_slot(-1)
    flood.result(ATTACK_SECONDS)
    complaints += _recovered(beside, "while connections were held")
    deployment.kill_slot(0)
    complaints += _recovered(beside, "in a quiet deployment")
    logs = [*deployment.logs.glob("*.log"), deployment.output]
    complaints += [f"{log.name} holds text of a prompt" for log in logs if SENTINEL in log.read_text(errors="replace")]
    sizes = {log.name: log.stat().st_size for log in logs}
    complaints += [f"{name} has {size / 1e6:.0f} MB" for name, size in sizes.items() if size > MOST_LOG_BYTES]
    for line in complaints:
        print(f"    ! {line}", flush=True)
    return complaints


def _recovered(beside: Beside, when: str) -> list[str]:
    deadline = time.monotonic() + RECOVERY_SECONDS
    while (wrong := beside.again()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"{RECOVERY_SECONDS:g} s after a slot was killed {when}: {wrong}"] if wrong else []


def insiders_of(deployment: Deployment, scale: Scale, seed: int) -> Iterator[tuple[str, Attack]]:
    """Attacks on two slots of their own, under the plan of the deployment."""
    for first in range(0, scale.insider_frames, INSIDER_CHUNK):
        some = min(INSIDER_CHUNK, scale.insider_frames - first)
        plan = deployment.record.plan
        yield f"insiders/{first}", partial(insiders.fuzz, plan=plan, seed=seed, first=first, count=some)


def _besiege(
    siege: Siege, beside: Beside, deployment: Deployment, listed: Sequence[tuple[str, Attack]], only: Sequence[str]
) -> None:
    for name, attack in listed:
        if _is_wanted(name, only):
            siege.attack(name, attack)
    complaints = aftermath(siege, beside, deployment)
    siege.findings.outcome.complaints += complaints


def measure(scale: Scale, seed: int, only: Sequence[str]) -> list[Row]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wishes = Wishes(make_model(folder), max_model_len=1024, output_tokens=400, concurrency=8, open_files=OPEN_FILES)
        deployment = stack.enter_context(deployed(folder, wishes))
        beside = stack.enter_context(Beside(deployment.port, NAME))
        attacker = ProcessPoolExecutor(1, get_context("spawn"), initializer=os.nice, initargs=(NICENESS,))
        stack.callback(attacker.shutdown, wait=False, cancel_futures=True)
        siege = Siege(deployment, beside, attacker)
        try:
            _besiege(siege, beside, deployment, [*attacks(scale, seed), *insiders_of(deployment, scale, seed)], only)
        except (RuntimeError, OSError) as error:  # nothing is left to attack: what was found counts all the same
            print(f"    ! the deployment is gone: {error}", flush=True)
            siege.findings.outcome.complaints.append(f"the deployment is gone: {error}")
    return rows(siege, beside)


def rows(siege: Siege, beside: Beside) -> list[Row]:
    findings = siege.findings
    for failure in beside.failures[:20]:
        print(f"    ! the stream beside, during {failure}")
    worst, growth = max(siege.vitals.grown.items(), key=lambda item: item[1], default=("nothing", 0))
    gaps = {during: gap for during, gap in beside.longest_gaps.items() if during != OWN_KILLS}
    slowest, pause = max(gaps.items(), key=lambda item: item[1], default=("nothing", 0.0))
    waited, wait = max(beside.longest_waits.items(), key=lambda item: item[1], default=("nothing", 0.0))
    return [
        _limit("crashes", findings.crashes, "processes that ended", 0),
        _limit("epochs_by_strangers", findings.epochs, "epochs", 0),
        _limit("memory_growth_bytes", growth, f"bytes, {worst}", MOST_GROWTH_BYTES),
        _limit("longest_pause_seconds", pause, f"s, during {slowest}", LONGEST_PAUSE_SECONDS),
        _limit("beside_failures", len(beside.failures), f"of {beside.answers + len(beside.failures)} answers", 0),
        _limit("server_errors", findings.outcome.server_errors, "answers of 5xx", 0),
        _limit("complaints", len(findings.outcome.complaints), "other findings", 0),
        Row("longest_first_token_seconds", wait, f"s, during {waited}"),
        Row("fuzzed_requests", findings.requests, "requests"),
        Row("fuzzed_frames", findings.frames, "frames"),
    ]


def _limit(name: str, value: float, unit: str, goal: float) -> Row:
    return Row(name, value, unit, goal=goal, lower_is_better=True)


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name in only or name.partition("/")[0] in only


def _probed(probe: Callable[[Target], list[str]], target: Target) -> Outcome:
    return Outcome(attacks=1, complaints=probe(target))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the fuzzing, shorter waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="NAME,...", help="these attacks, as the run names them")
    chosen, rest = parser.parse_known_args()
    only = [name for name in chosen.only.split(",") if name]
    run("hostile", lambda: measure(QUICK if chosen.quick else Scale(), chosen.seed, only), rest)


if __name__ == "__main__":
    main()
