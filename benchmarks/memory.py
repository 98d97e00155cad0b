"""Predicted against measured memory: fresh slots that load a slice, take the largest prefill and a full batch of decodes.

`python -m benchmarks.memory [--json FILE]`. Measured is the peak of private memory (sampled from outside while the slot
works) beyond what the same slot held before its first role; predicted is the plan's total without the framework's overhead.
"""

import itertools
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from benchmarks.rows import Row, run
from benchmarks.slots import ServedPipeline, SlotProcess, slot_processes
from strata_planner.cluster import Cluster, Device, Node
from strata_planner.contract.control import GetStatus
from strata_planner.contract.plan import Plan, Stage
from strata_planner.model import Model
from strata_planner.planning import PlanRequest, make_plan
from strata_planner.workload import Workload
from strata_runtime.loading.random_model import make_random_model
from strata_runtime.pipeline.client import PipelineClient
from strata_runtime.pipeline.memory import private_bytes

SHAPES = {
    "vocab_size": 16_000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CASES: tuple[tuple[int, tuple[int, ...], int], ...] = (  # stages, allowed bits, sequences
    (2, (16,), 8),
    (2, (8,), 16),
    (3, (4,), 8),
    (2, (3,), 32),
    (3, (3, 4, 8, 16), 16),
)
PROMPT, ANSWER = 192, 8
_SAMPLE_SECONDS = 0.02  # a look costs milliseconds of a core; what a step takes, the slot keeps


@dataclass(frozen=True)
class Slice:
    """One slot's slice: what the plan said and what the kernel saw."""

    what: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


class PeakWatch:
    """Samples the private memory of processes until it is left; the peak of each by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.peaks = dict.fromkeys(pids, 0)
        self._rollups = {name: Path(f"/proc/{pid}/smaps_rollup") for name, pid in pids.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            for name, rollup in self._rollups.items():
                self.peaks[name] = max(self.peaks[name], private_bytes(rollup))


def plan(model: Path, stages: int, bits: tuple[int, ...], sequences: int) -> Plan:
    """A plan whose stages mix the allowed bits: unlike memories leave no room for the finest."""
    sizes = [(170 << 20) * (1 + 0.4 * place) if len(bits) > 1 else 4 << 30 for place in range(stages)]
    nodes = tuple(
        Node(name=f"n{place}", devices=(Device(type="cpu", memory_bytes=int(size), threads=1),))
        for place, size in enumerate(sizes)
    )
    request = PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes=nodes),
        workload=Workload(prompt_tokens=PROMPT, output_tokens=ANSWER, concurrency=sequences),
        max_model_len=256,
        allowed_bits=bits,
        min_stages=stages,
        max_stages=stages,
    )
    return make_plan(request).plan


def measure_slices(model: Path) -> list[Slice]:
    slices = []
    for stages, bits, sequences in CASES:
        chosen = plan(model, stages, bits, sequences)
        with slot_processes(chosen) as slots:
            slices += _slices(chosen, slots, sequences)
    return slices


def _slices(chosen: Plan, slots: Mapping[str, SlotProcess], sequences: int) -> list[Slice]:
    idle = {name: slot.ask(GetStatus()).idle_bytes for name, slot in slots.items()}
    client = PipelineClient(slots)
    with PeakWatch({name: slot.process.pid for name, slot in slots.items()}) as watch:
        ServedPipeline(client, client.serve(chosen)).measure(sequences, PROMPT, ANSWER)
    return [
        Slice(
            what=_describe(stage),
            predicted_bytes=stage.memory.total_bytes - stage.memory.overhead_bytes,
            measured_bytes=watch.peaks[stage.slot] - idle[stage.slot],
        )
        for stage in chosen.replicas[0].stages
    ]


def _describe(stage: Stage) -> str:
    bits = " ".join(f"{len(list(group))}x{value}" for value, group in itertools.groupby(stage.bits))
    ends = "embedding, " * stage.embedding + "head, " * stage.head
    return f"layers {stage.layers[0]}-{stage.layers[1]}, {ends}bits {bits}"


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        slices = measure_slices(make_random_model(Path(folder), "llama", dtype=torch.bfloat16, **SHAPES))
    print("memory of fresh slots, MiB:")
    for one in slices:
        print(
            f"  predicted {one.predicted_bytes / 2**20:7.1f}  measured {one.measured_bytes / 2**20:7.1f}  {one.error:+6.1%}  {one.what}"
        )
    worst = max(slices, key=lambda one: abs(one.error))
    return [
        Row(
            name="memory",
            value=abs(worst.error),
            unit=f"worst error of {len(slices)} slices",
            peer="measured bytes of the worst slice",
            peer_value=worst.measured_bytes,
            ratio=abs(worst.error),
            goal=0.05,
            lower_is_better=True,
        )
    ]


if __name__ == "__main__":
    run("memory", measure)
