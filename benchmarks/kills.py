"""Faults at random moments under `strata up` with 16 streams running: what is lost, what is doubled, and how long clients wait.

`python -m benchmarks.kills [--kills 100] [--seed 16] [--scenes kill,hung,stuck,replica,gone,bf16] [--json FILE]`. The whole local chain: the supervisor
(in this process), slots and gateway as processes, HTTP clients in a process of their own, strata-tiny. Every text is compared with what the same
request got before anything went wrong. A seed gives the same faults in the same order; when the machine meets them it alone decides.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import hanging_slot
from benchmarks.deployment import NAME, Wishes
from benchmarks.faults import Fault, FaultKind, Injector
from benchmarks.load.answers import Answer, Kind, kinds, load, undisturbed
from benchmarks.rows import Row, run
from strata_operator.commands.inputs import measured, read_question
from strata_operator.commands.up import UpOptions, local_options
from strata_operator.decide.planning import takeover_of
from strata_operator.local.deployment import LocalDeployment, Programs
from strata_operator.local.mending import Mender
from strata_operator.local.run import log_to
from strata_planner.search.planning import make_plan

MODEL = Path("examples/models/strata-tiny").resolve()
KILLS, STREAMS, SEED = 100, 16, 16
PAUSE_SECONDS = (1.5, 4.5)  # between a repair and the next fault: few epochs enough that none is put off


@dataclass(frozen=True)
class Scene:
    """A deployment, and what befalls it. `share`: of the kills that are asked for; `faults`: each with its weight."""

    name: str
    wishes: Wishes
    faults: dict[FaultKind, int]
    share: float
    max_replicas: int = 1
    step_timeout: int | None = None  # seconds that a step may be still; None: by default
    losses: int = 0  # slots that it can lose for good before it is started anew; 0: none is

    @property
    def is_exact(self) -> bool:
        return self.wishes.compute_type == "float32"


def _wishes(stages: int, compute_type: str = "float32") -> Wishes:
    return Wishes(
        MODEL, max_model_len=768, prompt_tokens=220, output_tokens=220, concurrency=STREAMS, stages=stages,
        compute_type=compute_type, device_bytes=600_000_000,
    )  # fmt: skip


SCENES = (
    Scene("kill", _wishes(3), {"kill": 8, "two at once": 1, "during the repair": 1}, 1.0),
    Scene("hung", _wishes(3), {"hung": 1}, 0.1),
    Scene("stuck", _wishes(3), {"stuck": 2, "deaf": 1}, 0.1, step_timeout=3),
    Scene("replica", _wishes(2), {"kill": 1}, 0.2, max_replicas=2),
    Scene("gone", _wishes(3), {"gone": 1}, 0.12, losses=2),
    Scene("bf16", _wishes(3, "bfloat16"), {"kill": 8, "two at once": 1, "during the repair": 1}, 0.2),
)


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

    def _is_fixed(self, kind: int) -> bool:
        return len(self.wanted[kind].tokens) in self._asked_lengths

    @property
    def _asked_lengths(self) -> set[int]:
        return {kind.body["max_tokens"] for kind in kinds(NAME, STREAMS, 0)}

    @staticmethod
    def _of(answer: Answer) -> tuple[list[str], str]:
        return answer.tokens, answer.text


@contextlib.asynccontextmanager
async def deployed(scene: Scene, folder: Path) -> AsyncIterator[tuple[LocalDeployment, Injector]]:
    """As `strata up` starts it, but for the fewest stages, which a repair may go below: here they only force a split."""
    files = [folder / "deployment.json", folder / "cluster.json"]
    described = json.loads(json.dumps(scene.wishes.deployment()))
    described["spec"]["placement"] |= {"maxStages": scene.wishes.stages, "maxReplicas": scene.max_replicas}
    if scene.step_timeout is not None:
        described["spec"]["runtime"]["stepTimeoutSeconds"] = scene.step_timeout
    cluster = replace(scene.wishes, stages=scene.wishes.stages * scene.max_replicas).cluster()
    for file, content in zip(files, (described, cluster), strict=True):
        file.write_text(json.dumps(content))
    question = measured(read_question(files[0], files[1], measure=False))
    plan = make_plan(question.request).plan
    logs = folder / "logs"
    logs.mkdir()
    programs = Programs(slot=hanging_slot.__name__)
    up = UpOptions(files[0], files[1], "127.0.0.1", 0, None, logs, programs=programs)
    options = local_options(up, question, plan, logs)
    free = replace(question.request, min_stages=1)
    mender = Mender(free, takeover_of(question.deployment), question.deployment.spec.replanning.min_gain)
    injector = Injector()
    deployment = LocalDeployment(plan, replace(options, mender=mender), lambda: injector.look(deployment))
    async with deployment:
        await deployment.ready()
        yield deployment, injector


async def play(scene: Scene, count: int, seed: int) -> Seen:
    """So many faults, in as many deployments as they take."""
    faults: list[Fault] = []
    answers: list[Answer] = []
    wanted: list[Answer] = []
    asked = kinds(NAME, STREAMS, seed)
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
        told = await asyncio.to_thread(clients.end)
        serving.cancel()
    return told


def shown(seen: Sequence[Seen]) -> Table:
    table = Table(title="seconds from the fault on: median / p99", title_justify="left")
    for column in ("scene", "fault", "times", "noticed", "planned", "in force", "next token", "every stream"):
        table.add_column(column)
    for scene in seen:
        for kind in scene.scene.faults:
            these = [fault for fault in scene.faults if fault.kind == kind]
            columns = [[getattr(fault, name) for fault in these] for name in Fault.STEPS]
            if these:
                table.add_row(scene.scene.name, kind, str(len(these)), *map(_two, columns))
    return table


def _two(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {quantile(known):.2f}" if known else "-"


def quantile(values: Sequence[float], share: float = 0.99) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


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
        ]
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


def measure(kills: int, seed: int, names: Sequence[str], times: Path | None) -> list[Row]:
    scenes = [scene for scene in SCENES if scene.name in names]
    seen = [asyncio.run(play(scene, max(1, round(kills * scene.share)), seed)) for scene in scenes]
    Console(width=150).print(shown(seen))
    if times:
        told = [fault.as_json() | {"scene": each.scene.name} for each in seen for fault in each.faults]
        times.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return rows_of(seen)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", add_help=False)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--scenes", default=",".join(scene.name for scene in SCENES))
    parser.add_argument("--times", type=Path, metavar="FILE", help="write every fault's times to this file")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    log_to(Console(stderr=True))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run("kills", lambda: measure(chosen.kills, chosen.seed, chosen.scenes.split(","), chosen.times), rest)


if __name__ == "__main__":
    main()
