"""A change of plan without a loss: how long running streams pause. Used by `benchmarks.elastic`, which makes plans and prompts.

A slot comes back, or one is drained: the next plan is prepared beside the serving one, while streams run, then committed, and every stream goes on at the new leader.
The pause of a stream is its longest wait between two tokens, from the commit's beginning to its first token behind it at the latest. Beside it stand the longest wait before the
prepare, and what the pause is beyond the usual wait, the median of those before: on a slow machine a step alone takes most of a hundred milliseconds.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rich.table import Table

from benchmarks.rows import Row
from benchmarks.slots import SlotProcess
from strata_planner.contract.control import GetStatus
from strata_planner.contract.frames import Submit
from strata_planner.contract.plan import Plan
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.wire.client import LeaderClient, PipelineClient

Kind = Literal["grow back", "drain"]
_GOAL_MS = 100.0
_BEFORE = 10  # tokens of each stream before the prepare
_LOOK_SECONDS, _GLANCE_SECONDS = 0.05, 0.002


class Running(Protocol):
    """Streams, as `benchmarks.elastic` has them."""

    prompts: Mapping[str, list[int]]
    tokens: dict[str, list[int]]
    doubled: int

    def submits(self) -> list[Submit]: ...
    def take(self, leader: LeaderClient) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def lost(self) -> int: ...


class Moments(NamedTuple):
    """Milliseconds. `first`: from the last token before the commit to the next one of any stream; `longest`: of the stream that waits longest; `step`: likewise,
    undisturbed; `preparing`: likewise, while the next plan is prepared; `committed`: the commit alone, until the new leader answers. `usual`: the median wait of
    all streams, undisturbed.
    """

    first: float
    longest: float
    step: float
    preparing: float
    committed: float
    usual: float

    @property
    def beyond(self) -> float:
        """What the change adds to the wait of the stream that waits longest."""
        return self.longest - self.usual


@dataclass(frozen=True)
class Change:
    """`computed`: of what was cached, tokens x layers, the share computed again. `stage`: that comes or goes."""

    kind: Kind
    moments: Moments
    computed: float
    lost: int
    doubled: int
    running: int
    tokens: dict[str, list[int]]
    stage: int = -1
    equal: bool = False


@dataclass
class _Clock:
    """When each stream had its last token, and who waited longest for one."""

    streams: Running
    last: dict[str, float] = field(default_factory=dict)
    longest: float = 0.0
    waits: list[float] = field(default_factory=list)

    def listen(self, leader: LeaderClient, seconds: float) -> None:
        """To one message, if it comes so soon."""
        if not leader.heard(seconds):
            return
        had = {name: len(got) for name, got in self.streams.tokens.items()}
        self.streams.take(leader)
        now = time.perf_counter()
        for name, got in self.streams.tokens.items():
            if len(got) > had[name]:
                if name in self.last:
                    self.waits.append(now - self.last[name])
                    self.longest = max(self.longest, self.waits[-1])
                self.last[name] = now

    def phase(self) -> float:
        """The longest wait since the last call, in milliseconds; `waits` are those since then."""
        longest, self.longest = self.longest, 0.0
        self.waits.clear()
        return 1000 * longest


def changed(slots: dict[str, SlotProcess], kind: Kind, plans: Sequence[Plan], streams: Running) -> Change:
    """The streams from the first plan into the second, to their ends. Raises RuntimeFaultError where all were over before the commit."""
    client = PipelineClient(slots)
    leader, clock = client.serve(plans[0]), _Clock(streams)
    try:
        step, usual = _undisturbed(leader, clock)
        names = _prepared(client, plans[1], leader, clock)
        preparing = clock.phase()
        running = {name: len(streams.tokens[name]) for name in _unfinished(streams)}
        if not running:
            raise RuntimeFaultError(
                "every stream was over before the next plan was prepared: longer answers are needed"
            )
        begun = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # what comes meanwhile is taken when it comes
            committing = pool.submit(client.commit, plans[1], names)
            while not committing.done():
                clock.listen(leader, _GLANCE_SECONDS)
        after = committing.result()
        committed = 1000 * (time.perf_counter() - begun)
        first, longest = _gone_on(after, clock)
        computed = _computed(client, plans[1]) / (
            sum(len(streams.prompts[name]) + count - 1 for name, count in running.items()) * plans[1].num_layers
        )
        after.close()
    finally:
        leader.close()
    moments = Moments(first, longest, step, preparing, committed, usual)
    return Change(kind, moments, computed, streams.lost, streams.doubled, len(running), dict(streams.tokens))


def _undisturbed(leader: LeaderClient, clock: _Clock) -> tuple[float, float]:
    """The longest wait of a stream and the median one, when each has its first tokens."""
    streams = clock.streams
    _send(streams, leader)
    while len(clock.last) < len(streams.prompts):
        clock.listen(leader, 1)
    clock.phase()
    wanted = streams.count + _BEFORE * len(streams.prompts)
    while streams.count < wanted:
        clock.listen(leader, 1)
    usual = 1000 * statistics.median(clock.waits)
    return clock.phase(), usual


def _prepared(client: PipelineClient, plan: Plan, leader: LeaderClient, clock: _Clock) -> list[str]:
    """By which slots."""
    names = list(client.prepare(plan))
    waiting, asked = set(names), time.perf_counter()
    while waiting:
        clock.listen(leader, _LOOK_SECONDS)
        if time.perf_counter() - asked > _LOOK_SECONDS:
            waiting = {name for name in waiting if client.slots[name].ask(GetStatus()).prepare.phase != "prepared"}
            asked = time.perf_counter()
    return names


def _gone_on(leader: LeaderClient, clock: _Clock) -> tuple[float, float]:
    """To the streams' ends. Milliseconds from the last token before to the next of any, and the longest wait until all that ran have one."""
    streams, before = clock.streams, max(clock.last.values())
    had, count, first, longest = (
        {name: len(streams.tokens[name]) for name in _unfinished(streams)},
        streams.count,
        0.0,
        0.0,
    )
    # Who waits longest first, as gateways do.
    for submit in sorted(streams.submits(), key=lambda each: clock.last[each.request]):
        leader.send(submit)
    while streams.lost:
        clock.listen(leader, 1)
        if not first and streams.count > count:
            first = 1000 * (time.perf_counter() - before)
        if not longest and all(len(streams.tokens[name]) > number for name, number in had.items()):
            longest = clock.phase()
    return first, longest


def _computed(client: PipelineClient, plan: Plan) -> int:
    """Tokens x layers that were computed again since the commit."""
    stages = plan.replicas[0].stages
    stats = [client.slots[stage.slot].ask(GetStatus()).roles[0] for stage in stages]
    return sum(
        role.refilled + role.prefill_tokens * (stage.layers[1] - stage.layers[0] + 1)
        for stage, role in zip(stages, stats, strict=True)
    )


def _unfinished(streams: Running) -> list[str]:
    return [each.request for each in streams.submits()]


def _send(streams: Running, leader: LeaderClient) -> None:
    for submit in streams.submits():
        leader.send(submit)


def shown_changes(seen: Sequence[Change]) -> Table:
    table = Table(title="a change without a loss: milliseconds", title_justify="left")
    for column in (
        *("kind", "stage", "usual wait", "longest before", "while preparing", "commit", "next token", "longest pause"),
        *("beyond the usual", "streams", "computed again", "texts as undisturbed"),
    ):
        table.add_column(column)
    for each in seen:
        values = (
            each.moments.usual,
            each.moments.step,
            each.moments.preparing,
            each.moments.committed,
            each.moments.first,
            each.moments.longest,
            each.moments.beyond,
        )
        shares = (str(each.running), f"{each.computed:.3f}", str(each.equal))
        table.add_row(each.kind, str(each.stage), *(f"{value:.0f}" for value in values), *shares)
    return table


def rows_of_changes(seen: Sequence[Change]) -> list[Row]:
    rows: list[Row] = []
    kinds: tuple[Kind, ...] = ("grow back", "drain")
    for kind in kinds:
        ours, name = [each for each in seen if each.kind == kind], kind.replace(" ", "_")
        if not ours:
            continue
        unit = f"ms, longest of a stream, of {len(ours)}"
        rows += [
            Row(
                f"{name}_pause_ms",
                statistics.median(each.moments.longest for each in ours),
                f"{unit}, median; computed again: {statistics.mean(each.computed for each in ours):.3f}",
                goal=_GOAL_MS,
                lower_is_better=True,
            ),
            Row(f"{name}_pause_ms_worst", max(each.moments.longest for each in ours), unit),
            Row(
                f"{name}_beyond_ms",
                statistics.median(each.moments.beyond for each in ours),
                f"ms of the pause beyond the usual wait, {statistics.median(each.moments.usual for each in ours):.0f}",
            ),
            Row(
                f"{name}_first_ms",
                statistics.median(each.moments.first for each in ours),
                "ms to the next token of any stream",
            ),
            Row(
                f"{name}_step_ms",
                statistics.median(each.moments.step for each in ours),
                "ms, longest of a stream before",
            ),
            Row(
                f"{name}_recomputed_share",
                statistics.mean(each.computed for each in ours),
                "of tokens x layers that were cached",
                goal=0,
                lower_is_better=True,
            ),
            Row(f"{name}_equal", statistics.mean(each.equal for each in ours), "of the changes: all texts, 16 bits"),
        ]
    lost, doubled = sum(each.lost for each in seen), sum(each.doubled for each in seen)
    return [
        *rows,
        Row("change_lost", lost, "requests", goal=0, lower_is_better=True),
        Row("change_doubled", doubled, "tokens, or skipped", goal=0, lower_is_better=True),
    ]
