"""What drafts of a model's own weights at 4 bits bring: tokens a second of one greedy stream, with them over without.

`python -m benchmarks.self_drafts [--tiny] [--json FILE]`. strata-tiny and a random model of 1.1 billion parameters, with layers of 16 and of 8 bits, over one stage
and over three, a thread each. How often drafts are right is told beside: random weights agree less with their own first bits than trained ones.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from benchmarks import perplexity, pipeline
from benchmarks.rows import Row, run
from benchmarks.slots import slot_processes
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.frames import Sampling, Submit
from strata_planner.contract.plan import NO_SPECULATION, Plan, Speculation
from strata_planner.question.workload import Workload
from strata_runtime.model.random_model import make_random_model
from strata_runtime.tools.quantize.__main__ import main as quantize
from strata_runtime.wire.client import LeaderClient, PipelineClient

TINY = perplexity.MODEL.resolve()
LARGE = {  # of TinyLlama
    **pipeline.SHAPES,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
}
STAGES = (1, 3)
FORMATS: tuple[FormatName, ...] = ("dense", "any8")
DRAFTING = Speculation("selfPrecision", 4)
PROMPT, RUNS, GOAL = 64, 3, 1.5


class Rate(NamedTuple):
    """Of one run: tokens a second, and the share of verified drafts that were right."""

    tokens_per_second: float
    right: float


def plan(model: Path, stages: int, name: FormatName, length: int) -> Plan:
    """Every layer in one format."""
    made = pipeline.plan(model, stages, Workload(PROMPT, length, 1), PROMPT + length + 16)
    (replica,) = made.replicas
    moved = tuple(
        structs.replace(stage, format=(name,) * len(stage.format), bits=(BITS_OF_FORMAT[name],) * len(stage.bits))
        for stage in replica.stages
    )
    return structs.replace(made, replicas=(structs.replace(replica, stages=moved),))


def measure_rate(leader: LeaderClient, prompt: Sequence[int], length: int) -> Rate:
    before = leader.hello()
    submit = Submit("drafts", list(prompt), [], length, [], Sampling(0.0), salt="apart")
    leader.generate([submit])  # kernels
    started = time.perf_counter()
    leader.generate([structs.replace(submit, request="measured")])
    seconds = time.perf_counter() - started
    after = leader.hello()
    drafted = after.draft_tokens - before.draft_tokens
    return Rate(length / seconds, (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0)


def measure_model(name: str, model: Path, prompt: Sequence[int], length: int) -> list[Row]:
    rows = []
    for stages in STAGES:
        for layers in FORMATS:
            wanted = plan(model, stages, layers, length)
            right: list[float] = []
            with slot_processes(wanted) as slots:
                client = PipelineClient(slots)

                def rate(wish: Speculation) -> float:
                    served = client.serve(structs.replace(wanted, speculation=wish))  # noqa: B023  called within its turn
                    measured = measure_rate(served, prompt, length)
                    right.append(measured.right)  # noqa: B023
                    return measured.tokens_per_second

                value, peer = pipeline.alternate(partial(rate, DRAFTING), partial(rate, NO_SPECULATION), RUNS)
            mark = "" if stages == 1 else f"_{stages}_stages"
            unit = f"tokens/s, {max(right):.0%} of drafts right"
            bits = BITS_OF_FORMAT[layers]
            rows.append(Row(f"spec_self_{name}_{bits}{mark}", value, unit, "none", peer, value / peer, GOAL))
    return rows


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """What loads keep lies here."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def measure(*, tiny_alone: bool = False) -> list[Row]:
    with tempfile.TemporaryDirectory() as name, own_cache(Path(name) / "cache"):
        (passage, *_) = perplexity.texts(TINY)
        rows = measure_model("tiny", TINY, passage[:PROMPT], 256)
        if not tiny_alone:
            large = make_random_model(Path(name) / "large", "llama", dtype=torch.bfloat16, **LARGE)
            quantize([str(large)])  # minutes, for which no slot is waited
            rows += measure_model("1b", large, [31 * place % 30_000 for place in range(PROMPT)], 64)
    return rows


if __name__ == "__main__":
    rest = [each for each in sys.argv[1:] if each != "--tiny"]
    run("self_drafts", partial(measure, tiny_alone="--tiny" in sys.argv), rest)
