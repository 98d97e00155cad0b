"""One loss, looked at: every token of every stream before, during and after, the layers' bits, and what text the model tells well.

`python -m benchmarks.loss [--picture FILE.svg] [--json FILE]`. strata-tiny at 16 bits over three slots of one thread, on devices so small that two of them hold
it at fewer bits alone. In the midst of eight greedy streams the second slot is killed; its neighbours take its layers over at the bits that the repair leaves.
Later a slot of that name comes back, and the plan of before with it. Perplexity is asked of the running pipeline, by the log probabilities of held-out prompts.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.elastic import Local, Streams
from benchmarks.loss_picture import Loss, loss_svg
from benchmarks.perplexity import MODEL, texts
from benchmarks.rows import Row, run
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.frames import Sampling, Submit
from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_runtime.wire.client import LeaderClient

STAGES, STREAMS, PROMPT, ANSWER, LONGEST = 3, 8, 48, 160, 512
VICTIM = 1
KILLED_AFTER = STREAMS * 60  # tokens of all streams
WINDOWS = 24  # of held-out text, up to 500 tokens each
_SCORED = 500
_MIB = 1 << 20


@dataclass
class Timed(Streams):
    """Streams whose tokens have times."""

    moments: dict[str, list[float]] = field(default_factory=dict)

    def take(self, leader: LeaderClient) -> None:
        before = {name: len(got) for name, got in self.tokens.items()}
        super().take(leader)
        now = time.perf_counter()
        for name, got in self.tokens.items():
            self.moments.setdefault(name, []).extend([now] * (len(got) - before.get(name, 0)))


def smallest(model: Path) -> tuple[PlanRequest, Plan]:
    """Three alike devices of as few MiB as the model takes at 16 bits, and its plan on them."""
    for mib in range(16, 256):
        nodes = tuple(
            Node(name=f"n{place}", devices=(Device(type="cpu", memory_bytes=mib * _MIB, threads=1),))
            for place in range(STAGES)
        )
        request = PlanRequest(
            deployment="loss",
            model_uri=str(model),
            model=Model.from_folder(model),
            cluster=Cluster(nodes=nodes),
            workload=Workload(PROMPT, ANSWER, STREAMS),
            max_model_len=LONGEST,
            allowed_bits=(16,),
            min_stages=STAGES,
            max_stages=STAGES,
            max_replicas=1,
            solver="pipeline",
            method="anyPrecision",
        )
        try:
            return request, make_plan(request).plan
        except InfeasibleError:
            continue
    raise InfeasibleError(f"{model} does not fit three devices of 256 MiB")


class Seen(Local):
    """The plan on slots of this machine, and what the running pipeline makes of a text."""

    def perplexity(self, rows: Sequence[Sequence[int]]) -> float:
        """Of the tokens of these texts, each behind those before it."""
        wanted = Sampling(prompt_logprobs=0)
        for number, row in enumerate(rows):
            self._leader.send(Submit(f"p{number}", list(row), [], 1, [], wanted, salt=f"p{number}"))
        logs: list[float] = []
        for _ in rows:
            (event,) = self._leader.events()
            logs += [score.logprob for score in event.prompt]
        return math.exp(-sum(logs) / len(logs))

    def comes_back(self, slot: SlotProcess) -> None:
        """In the place of the slot that was killed, with the plan of before."""
        self._slots[slot.name] = self._client.slots[slot.name] = slot
        self._leader = self._client.serve(self._plan)
        self.serving = self._plan


def looked_at(folder: Path) -> Loss:
    """The loss, on a copy of the model that has its any-precision copy beside it."""
    model = folder / MODEL.name
    shutil.copytree(MODEL, model)
    command = [sys.executable, "-m", "strata_runtime.tools.quantize", str(model)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    request, plan = smallest(model)
    held_out = [row[:_SCORED] for row in texts(model)[: 2 * WINDOWS]]
    prompts = {f"s{number}": row[:PROMPT] for number, row in enumerate(held_out[WINDOWS : WINDOWS + STREAMS])}
    streams = Timed(prompts)
    widened = replace(request, allowed_bits=(3, 4, 5, 6, 7, 8, 16))
    with slot_processes(plan, bound=False) as slots:
        here = Seen(widened, plan, slots)
        try:
            before = here.perplexity(held_out[:WINDOWS])
            seconds, _ = here.taken_over(streams, VICTIM, KILLED_AFTER)
            during, mended = here.perplexity(held_out[:WINDOWS]), here.serving
            here.comes_back(SlotProcess(plan.replicas[0].stages[VICTIM].slot))
            after = here.perplexity(held_out[:WINDOWS])
        finally:
            here.close()
    return Loss(
        plans=(plan, mended, here.serving),
        perplexities=(before, during, after),
        victim=plan.replicas[0].stages[VICTIM].slot,
        seconds=seconds,
        moments={name: tuple(at - here.killed for at in came) for name, came in streams.moments.items()},
        lost=streams.lost,
        doubled=streams.doubled,
    )


def measure(picture: Path | None) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        loss = looked_at(Path(folder))
    if picture:
        picture.write_text(loss_svg(loss), encoding="utf-8")
    return rows_of(loss)


def rows_of(loss: Loss) -> list[Row]:
    before, during, after = loss.perplexities
    told = "of held-out text, asked of the running pipeline"
    return [
        Row("loss_next_token", loss.seconds.first, "s from the kill to the next token of any stream"),
        Row("loss_every_stream", loss.seconds.last, "s from the kill until every stream had one"),
        Row("loss_requests", loss.lost, "requests lost", goal=0, lower_is_better=True),
        Row("loss_doubled", loss.doubled, "tokens twice, or skipped", goal=0, lower_is_better=True),
        Row("loss_bits", loss.mean_bits(1), "a layer, mean, while two slots serve", "three slots", loss.mean_bits(0)),
        Row("perplexity_before", before, told),
        Row("perplexity_during", during, told, "before", before, during / before),
        Row("perplexity_after", after, told, "before", before, after / before, goal=1.0, lower_is_better=True),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", add_help=False)
    parser.add_argument("--picture", type=Path)
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("loss", lambda: measure(chosen.picture), rest)


if __name__ == "__main__":
    main()
