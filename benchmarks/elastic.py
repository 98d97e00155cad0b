"""A stage is gone for good, and its neighbours take over: seconds from the kill to the next token, and what they go to.

`python -m benchmarks.elastic [--kills 12] [--moves 6] [--no-log] [--shadows] [--json FILE]`. The 246M model of `benchmarks.pipeline` over three slots of one thread each, 16 streams of mixed prompts.
At a random moment one of the slots, the leader too, is killed with SIGKILL and does not come back. The survivors say so, the planner repairs the
plan, they prepare the difference, commit, and every stream that was running is replayed. The benchmark is the controller, without a gateway. Slots count what
they compute again: tokens x layers, over all that were cached of the streams which ran. `--no-log`: stages do not keep what they hand on. `--shadows`: they keep what they
would take over, and hold it before a slot is killed. `--moves`: changes without a loss, a slot
that comes back and one that is drained (`benchmarks.moves`).
"""

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import pipeline
from benchmarks.moves import Change, Kind, changed, rows_of_changes, shown_changes
from benchmarks.rows import Row, run
from benchmarks.slots import SlotProcess, await_shadows, slot_processes
from strata_planner.contract.control import GetStatus
from strata_planner.contract.frames import Submit
from strata_planner.contract.plan import Plan
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Takeover as Wishes
from strata_planner.replan.repair import repair
from strata_planner.replan.shadows import with_shadows
from strata_planner.search.planning import make_plan
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

KILLS, MOVES, STAGES, STREAMS, ANSWER = 12, 6, 3, 16, 96
SHADOW_BYTES = 1 << 30  # of each slot
LOG_BYTES = 1 << 30  # the same
PROMPTS = (16, 48, 96, 128)
MAX_MODEL_LEN = 256
SEED = 16
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0


@dataclass
class Streams:
    """Requests under way, and what has come of each."""

    prompts: Mapping[str, list[int]]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    doubled: int = 0  # or skipped

    def submits(self) -> list[Submit]:
        """Of those that are not over, from where they are."""
        asked = ((name, prompt, self.tokens.setdefault(name, [])) for name, prompt in self.prompts.items())
        return [greedy(name, prompt, ANSWER, got, salt=name) for name, prompt, got in asked if len(got) < ANSWER]

    def take(self, leader: LeaderClient) -> None:
        """One message of the leader's."""
        for event in leader.events():
            got = self.tokens[event.request]
            self.doubled += event.index != len(got)
            got.append(event.token)

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def lost(self) -> int:
        return sum(len(got) != ANSWER for got in self.tokens.values())


class Seconds(NamedTuple):
    """From the kill on. `committed`: in force; `last`: until every stream that was running had a token."""

    noticed: float
    planned: float
    prepared: float
    committed: float
    first: float
    last: float


@dataclass(frozen=True)
class Takeover:
    """The loss of one stage. `recomputed`: share of what was cached. `equal`: share of the tokens that are those of an undisturbed run."""

    victim: int  # its stage
    seconds: Seconds
    recomputed: float
    lost: int
    doubled: int
    equal: float


class Local:
    """The plan on slots of this machine, and the streams."""

    def __init__(self, request: PlanRequest, plan: Plan, slots: dict[str, SlotProcess]) -> None:
        self._request, self._plan, self._slots = request, plan, slots
        self._client = PipelineClient(slots)
        self._leader = self._client.serve(plan)
        await_shadows(plan, slots)
        self.serving = plan
        self.killed = math.inf  # when, by the clock of `time.perf_counter`

    def answered(self, prompts: Mapping[str, list[int]]) -> Streams:
        """All of it, undisturbed."""
        streams = Streams(prompts)
        self._send(streams)
        self._listen(streams, STREAMS * ANSWER)
        return streams

    def taken_over(self, streams: Streams, victim: int, moment: int) -> tuple[Seconds, float]:
        """Kill the slot of that stage after `moment` tokens of all; the streams go on to their end. With the share of tokens x layers computed again."""
        self._send(streams)
        self._listen(streams, moment)
        stage = self._plan.replicas[0].stages[victim]
        lost = self._slots[stage.slot]
        lost.process.kill()
        self.killed = begun = time.perf_counter()
        alive = {name: slot for name, slot in self._slots.items() if slot is not lost}
        self._await_notice(alive)
        noticed = time.perf_counter() - begun
        if not stage.leader:
            while self._leader.heard(0):
                streams.take(self._leader)
        left = self._request.cluster.without({stage.node})
        mended = repair(replace(self._request, cluster=left, min_stages=1), self._plan)
        planned = time.perf_counter() - begun
        names = self._client.prepared(mended.plan)
        prepared = time.perf_counter() - begun
        self._leader, self.serving = self._client.commit(mended.plan, names), mended.plan
        committed = time.perf_counter() - begun
        running = {name: len(got) for name, got in streams.tokens.items() if len(got) < ANSWER}
        self._send(streams)
        self._listen(streams, streams.count + 1)
        first = time.perf_counter() - begun
        last = first
        while streams.lost:
            streams.take(self._leader)
            if any(len(streams.tokens[name]) == had for name, had in running.items()):
                last = time.perf_counter() - begun
        cached = sum(len(streams.prompts[name]) + had - 1 for name, had in running.items()) * self._plan.num_layers
        return Seconds(noticed, planned, prepared, committed, first, last), self._recomputed(mended.plan) / cached

    def _recomputed(self, plan: Plan) -> int:
        """Tokens x layers since the epoch began: what kept blocks lacked, and all prompts, which are replays."""
        stages = plan.replicas[0].stages
        stats = [self._slots[stage.slot].ask(GetStatus()).roles[0] for stage in stages]
        return sum(
            role.refilled + role.prefill_tokens * (stage.layers[1] - stage.layers[0] + 1)
            for stage, role in zip(stages, stats, strict=True)
        )

    def close(self) -> None:
        self._client.close()

    def _send(self, streams: Streams) -> None:
        for submit in streams.submits():
            self._leader.send(submit)

    def _listen(self, streams: Streams, count: int) -> None:
        while streams.count < count:
            streams.take(self._leader)

    def _await_notice(self, alive: Mapping[str, SlotProcess]) -> None:
        deadline = time.perf_counter() + _PATIENCE_SECONDS
        while not any(slot.ask(GetStatus()).lost_peers for slot in alive.values()):
            if time.perf_counter() > deadline:
                raise TimeoutError("no survivor has noticed that its neighbour is gone")
            time.sleep(_LOOK_SECONDS)


@contextmanager
def local(request: PlanRequest, plan: Plan) -> Iterator[Local]:
    with slot_processes(plan, bound=False) as slots:
        here = Local(request, plan, slots)
        try:
            yield here
        finally:
            here.close()


def measure(kills: int, moves: int, *, log: bool = True, shadows: bool = False) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = pipeline.make_model(Path(folder))
        load = Workload(max(PROMPTS), ANSWER, STREAMS)
        request = replace(
            pipeline.question(model, STAGES, load, MAX_MODEL_LEN), boundary_log_bytes=LOG_BYTES if log else 0
        )
        plan = make_plan(request).plan
        if shadows:
            plan = with_shadows(replace(request, min_stages=1), plan, Wishes(), SHADOW_BYTES).plan
        draw = random.Random(SEED)
        prompts = {
            f"s{number}": [draw.randrange(1000) for _ in range(PROMPTS[number % len(PROMPTS)])]
            for number in range(STREAMS)
        }
        with local(request, plan) as here:
            wanted = here.answered(prompts).tokens
        seen = [_one(request, plan, prompts, wanted, number % STAGES, draw) for number in range(kills)]
        changes = [_change(request, plan, prompts, wanted, number) for number in range(moves)]
    console = Console(width=120)
    if seen:
        console.print(shown(seen))
    if changes:
        console.print(shown_changes(changes))
    return [*(rows_of(seen) if seen else ()), *(rows_of_changes(changes) if changes else ())]


def _change(
    request: PlanRequest,
    plan: Plan,
    prompts: Mapping[str, list[int]],
    wanted: Mapping[str, list[int]],
    number: int,
) -> Change:
    """A slot comes back and is drained again, in turn each, while the streams run."""
    stage = plan.replicas[0].stages[number // 2 % STAGES]
    left = replace(request, cluster=request.cluster.without({stage.node}), min_stages=1)
    pair = (repair(left, plan).plan, plan)
    kind: Kind = "drain" if number % 2 else "grow back"
    with slot_processes(plan, bound=False) as slots:
        change = changed(slots, kind, pair[::-1] if number % 2 else pair, Streams(prompts))
    return replace(change, stage=number // 2 % STAGES, equal=change.tokens == wanted)


def _one(
    request: PlanRequest,
    plan: Plan,
    prompts: Mapping[str, list[int]],
    wanted: Mapping[str, list[int]],
    victim: int,
    draw: random.Random,
) -> Takeover:
    streams = Streams(prompts)
    with local(request, plan) as here:
        seconds, recomputed = here.taken_over(streams, victim, draw.randrange(STREAMS, STREAMS * ANSWER * 3 // 4))
    equal = sum(
        one == other for name, got in streams.tokens.items() for one, other in zip(got, wanted[name], strict=True)
    )
    return Takeover(victim, seconds, recomputed, streams.lost, streams.doubled, equal / streams.count)


def shown(seen: Sequence[Takeover]) -> Table:
    table = Table(title="a stage gone for good: seconds from the kill on", title_justify="left")
    for column in (
        "stage",
        "noticed",
        "planned",
        "prepared",
        "committed",
        "first token",
        "every stream",
        "computed again",
        "tokens as undisturbed",
    ):
        table.add_column(column)
    for each in seen:
        table.add_row(
            str(each.victim), *(f"{value:.3f}" for value in each.seconds), f"{each.recomputed:.3f}", f"{each.equal:.3f}"
        )
    return table


def rows_of(seen: Sequence[Takeover]) -> list[Row]:
    first = [each.seconds.first for each in seen]
    lost, doubled = sum(each.lost for each in seen), sum(each.doubled for each in seen)
    parts = [
        Row(
            f"takeover_{name}",
            statistics.median(getattr(each.seconds, name) for each in seen),
            "s from the kill, median",
        )
        for name in ("noticed", "planned", "prepared", "committed", "last")
    ]
    behind = [each.recomputed for each in seen if each.victim]
    share = "of tokens x layers that were cached"
    unit = f"s from the kill to the next token, of {len(seen)}"
    return [
        Row("takeover_seconds", statistics.median(first), f"{unit}, median", goal=0.5, lower_is_better=True),
        Row("takeover_seconds_worst", max(first), unit, goal=1.5, lower_is_better=True),
        *parts,
        Row(
            "recomputed_share",
            statistics.mean(each.recomputed for each in seen),
            share,
            goal=0.36,
            lower_is_better=True,
        ),
        *([Row("recomputed_share_leader_alive", statistics.mean(behind), share)] if behind else []),
        Row("takeover_lost", lost, "requests", goal=0, lower_is_better=True),
        Row("takeover_doubled", doubled, "tokens, or skipped", goal=0, lower_is_better=True),
        Row("takeover_equal", statistics.mean(each.equal for each in seen), "of the tokens, 16 bits"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", add_help=False)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--moves", type=int, default=MOVES)
    parser.add_argument("--no-log", action="store_true")
    parser.add_argument("--shadows", action="store_true")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("elastic", lambda: measure(chosen.kills, chosen.moves, log=not chosen.no_log, shadows=chosen.shadows), rest)


if __name__ == "__main__":
    main()
