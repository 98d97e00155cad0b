"""Faults at random moments under `strata up` with 16 streams running: what is lost, what is doubled, and how long clients wait.

`python -m benchmarks.kills [--kills 100] [--seed 16] [--scenes kill,hung,...] [--quick] [--json FILE]`. The whole local chain: the supervisor (in a
process for each scene), slots and gateway as processes, HTTP clients in a process of their own, strata-tiny (`gone_246m`: the model of `elastic`). Every text is compared with what the same
request got before anything went wrong. A seed gives the same faults in the same order; when the machine meets them it alone decides.
Scenes whose slots are cut off need root, for network namespaces; elsewhere they say so and are skipped.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.deployment import NAME
from benchmarks.fault_scenes import SCENES, STREAMS, Scene, deployed
from benchmarks.faults import Fault, Injector
from benchmarks.load.answers import Answer, Kind, kinds, load, undisturbed
from benchmarks.rows import Row, run
from strata_operator.api.spec import ReplanningSpec
from strata_operator.local.deployment import LocalDeployment
from strata_operator.local.run import log_to

_RESTARTS = "processes that nothing had befallen"
KILLS, SEED = 100, 16
PAUSE_SECONDS = (1.5, 4.5)  # between a repair and the next fault: few epochs enough that none is put off
QUICK_FAULTS, QUICK_STREAMS = 1, 4  # of a scene, at most


@dataclass(frozen=True)
class Seen:
    """A scene, what was asked in it and what came of it."""

    scene: Scene
    faults: Sequence[Fault]
    answers: Sequence[Answer]
    wanted: Sequence[Answer]

    @property
    def lost(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error]

    @property
    def wrong(self) -> list[Answer]:
        """Whole answers that are not what was wanted."""
        return [each for each in self.answers if not each.error and self._of(each) != self._of(self.wanted[each.kind])]

    @property
    def miscounted(self) -> int:
        """Tokens too many or too few. Whoever stops by its text alone is left out where texts may differ."""
        fixed = [each for each in self.answers if not each.error and (self.scene.is_exact or self._is_fixed(each.kind))]
        return sum(abs(len(each.tokens) - len(self.wanted[each.kind].tokens)) for each in fixed)

    @property
    def equal(self) -> float:
        """Share of the tokens that are those of the undisturbed run, at their places."""
        pairs = [(each.tokens, self.wanted[each.kind].tokens) for each in self.answers if not each.error]
        same = sum(one == other for got, wanted in pairs for one, other in zip(got, wanted, strict=False))
        return same / max(1, sum(max(len(got), len(wanted)) for got, wanted in pairs))

    @property
    def restarts(self) -> int:
        """Of processes that nothing had befallen."""
        return sum(fault.survivor_restarts for fault in self.faults)

    @property
    def alone(self) -> float:
        """Share of the losses after which streams went on before the controller was back."""
        return sum((one.next_token or math.inf) < (one.healed or 0.0) for one in self.faults) / len(self.faults)

    def _is_fixed(self, kind: int) -> bool:
        return len(self.wanted[kind].tokens) in self._asked_lengths

    @property
    def _asked_lengths(self) -> set[int]:
        return {kind.body["max_tokens"] for kind in kinds(NAME, STREAMS, 0)}

    @staticmethod
    def _of(answer: Answer) -> tuple[list[str], str]:
        return answer.tokens, answer.text


async def play(scene: Scene, count: int, seed: int, streams: int) -> Seen:
    """So many faults, in as many deployments as they take."""
    faults: list[Fault] = []
    answers: list[Answer] = []
    wanted: list[Answer] = []
    asked = kinds(NAME, streams, seed, with_schema=not scene.is_large)
    draw = random.Random(f"{seed} {scene.name}")
    while len(faults) < count:
        here = min(count - len(faults), scene.losses or count)
        with tempfile.TemporaryDirectory() as folder:
            async with deployed(scene, Path(folder)) as (deployment, injector):
                wanted = wanted or await asyncio.to_thread(undisturbed, deployment.options.port, asked)
                told = await _under_load(deployment, injector, scene, asked, draw, here)
        faults += injector.faults
        answers += told
    for fault in faults:
        fault.take(answers)
    return Seen(scene, faults, answers, wanted)


async def _under_load(
    deployment: LocalDeployment,
    injector: Injector,
    scene: Scene,
    asked: Sequence[Kind],
    draw: random.Random,
    count: int,
) -> list[Answer]:
    with contextlib.ExitStack() as held:
        clients = held.enter_context(await asyncio.to_thread(load, deployment.options.port, asked))
        serving = asyncio.create_task(deployment.supervise())
        for _ in range(count):
            (kind,) = draw.choices(list(scene.faults), list(scene.faults.values()))
            await asyncio.sleep(draw.uniform(*PAUSE_SECONDS))
            one = asyncio.create_task(injector.strike(deployment, kind, draw))
            await asyncio.wait([one, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                one.cancel()
                serving.result()
            one.result()
            print(f"{scene.name}: {injector.faults[-1]}", flush=True)
            if not scene.losses and len({stage.slot for stage in deployment.plan.stages}) < scene.slots:
                break  # one that was killed again before it served was taken over: the next fault is another deployment's
        told = await asyncio.to_thread(clients.end)
        serving.cancel()
    return told


def shown(seen: Sequence[Seen]) -> Table:
    table = Table(title="seconds from the fault on: median / p99", title_justify="left")
    for column in ("scene", "fault", "times", "noticed", "planned", "in force", "next token", "every stream", "healed"):
        table.add_column(column)
    for scene in seen:
        for kind in scene.scene.faults:
            these = [fault for fault in scene.faults if fault.kind == kind]
            columns = [[getattr(fault, name) for fault in these] for name in (*Fault.STEPS, "healed")]
            if these:
                table.add_row(scene.scene.name, kind, str(len(these)), *map(_two, columns))
    return table


def _two(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {quantile(known):.2f}" if known else "-"


def quantile(values: Sequence[float], share: float = 0.99) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def totals(seen: Sequence[Seen]) -> list[Row]:
    """Over all runs."""
    requests = sum(len(each.answers) for each in seen)
    told = (
        ("lost_requests", sum(len(each.lost) for each in seen), f"of {requests} requests"),
        ("doubled_tokens", sum(each.miscounted for each in seen), "tokens, or skipped"),
        ("survivor_restarts", sum(each.restarts for each in seen), _RESTARTS),
    )
    return [Row(name, value, unit, goal=0, lower_is_better=True) for name, value, unit in told]


def _is_loss(fault: Fault) -> bool:
    """Whoever nobody hears for longer than slots are waited for is lost, for all that anybody can tell."""
    return fault.kind == "cut off from everybody" and (fault.healed or 0.0) > ReplanningSpec().grace_period_seconds


def rows_of(seen: Sequence[Seen]) -> list[Row]:
    rows = []
    for each in seen:
        name, count = f"elastic_{each.scene.name}", len(each.answers)
        for answer in each.lost[:5]:
            print(f"    ! lost: kind {answer.kind}, {answer.error}")
        for answer in each.wrong[:5] if each.scene.is_exact else ():
            print(f"    ! kind {answer.kind} at {answer.asked:.2f}: {difference(answer, each.wanted[answer.kind])}")
        rows += [
            Row(f"{name}_lost", len(each.lost), f"of {count} requests", goal=0, lower_is_better=True),
            Row(f"{name}_doubled", each.miscounted, "tokens, or skipped", goal=0, lower_is_better=True),
            Row(f"{name}_equal", each.equal, "of the tokens", goal=1.0 if each.scene.is_exact else None),
            Row(f"{name}_survivor_restarts", each.restarts, _RESTARTS, goal=0, lower_is_better=True),
        ]
        if each.scene.name == "partition":
            held = [fault for fault in each.faults if not _is_loss(fault)]
            lost = [fault for fault in each.faults if _is_loss(fault)]
            rows += [
                Row(
                    f"{name}_plans",
                    sum(fault.plans for fault in held),
                    "plans without who was cut off",
                    goal=0,
                    lower_is_better=True,
                ),
                Row(
                    f"{name}_taken_over",
                    sum(fault.plans > 0 for fault in lost),
                    f"of {len(lost)} cut off from everybody for longer than the grace",
                ),
            ]
        if each.scene.orders:
            rows.append(
                Row(f"{name}_alone", each.alone, "of the losses: streams went on without a controller", goal=1.0)
            )
        for kind in each.scene.faults:
            first = [one.next_token for one in each.faults if one.kind == kind and one.next_token is not None]
            if first:
                which = f"{name}_{kind.replace(' ', '_')}"
                rows.append(
                    Row(f"{which}_seconds", statistics.median(first), f"s to the next token, median of {len(first)}")
                )
                rows.append(Row(f"{which}_seconds_p99", quantile(first), "s"))
    return rows


def difference(got: Answer, wanted: Answer) -> str:
    pairs = enumerate(zip(got.tokens, wanted.tokens, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(got.tokens), len(wanted.tokens)))
    return (
        f"{len(got.tokens)} tokens for {len(wanted.tokens)}, from {place} on {got.tokens[place : place + 6]} "
        f"for {wanted.tokens[place : place + 6]}"
    )


def play_alone(scene: Scene, count: int, seed: int, streams: int) -> Seen:
    """In a process of its own, which may be stopped: it is the scene's controller."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_play, scene, count, seed, streams).result()


def _play(scene: Scene, count: int, seed: int, streams: int) -> Seen:
    log_to(Console(stderr=True))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return asyncio.run(play(scene, count, seed, streams))


def measure(chosen: argparse.Namespace) -> list[Row]:
    scenes = [scene for scene in SCENES if scene.name in chosen.scenes.split(",")]
    seen, skipped = [], []
    for scene in scenes:
        if lacks := scene.lacks:
            print(f"{scene.name}: skipped, {lacks}", flush=True)
            skipped.append(Row(f"elastic_{scene.name}", None, f"skipped: {lacks}"))
            continue
        count, streams = max(1, round(chosen.kills * scene.share)), STREAMS
        if chosen.quick:
            count, streams = min(count, QUICK_FAULTS), QUICK_STREAMS
        seen.append(play_alone(scene, count, chosen.seed, streams))
    Console(width=150).print(shown(seen))
    if chosen.times:
        told = [fault.as_json() | {"scene": each.scene.name} for each in seen for fault in each.faults]
        chosen.times.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return [*rows_of(seen), *skipped, *totals(seen)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", add_help=False)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--scenes", default=",".join(scene.name for scene in SCENES))
    parser.add_argument("--times", type=Path, metavar="FILE", help="write every fault's times to this file")
    parser.add_argument("--quick", action="store_true", help=f"one fault a scene, {QUICK_STREAMS} streams")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("kills", lambda: measure(chosen), rest)


if __name__ == "__main__":
    main()
