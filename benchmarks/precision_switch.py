"""Changing a running layer's bits: how long it takes, what it gives back, and how long a sequence that runs meanwhile waits.

`python -m benchmarks.precision_switch [--json FILE]`, some three minutes on two cores and 3 GB of memory. One decoder layer of Llama 2 7B's shape in a slot process of
one thread; its weights are random and its any-precision copy has random codes and tables: times and bytes do not depend on values. The files were just
written, so reads come from the page cache; from a disk they take what the disk takes.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from benchmarks.memory_cases import Architecture, Case, plan_of
from benchmarks.rows import Row, run
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.control import GetStatus, LayerSwitch, SetBits
from strata_planner.contract.formats import FormatName
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, Recipe
from strata_planner.contract.plan import Plan
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.question.model import Model
from strata_runtime.formats.any_precision import AnyParent
from strata_runtime.loading.artefact_writer import ArtefactWriter
from strata_runtime.loading.digest import model_digest
from strata_runtime.model.adapter import ModelSlice, read_config
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

LLAMA_7B = Architecture(
    "one layer of Llama 2 7B",
    "llama",
    {
        "vocab_size": 2048,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    (Case(((8,),), sequences=1, prompt=32, answer=64),),
)
ROUNDS = 5
SWITCH_AT = (8, 16, 24, 32)  # tokens of the running sequence, after which its layer goes down, up, down, up
ANSWER = 40
MILLISECONDS_GOAL, RETURNED_GOAL = 50.0, 0.95
_FORMATS: dict[int, FormatName] = {4: "any4", 8: "any8", 16: "dense"}


@dataclass(frozen=True)
class Switch:
    """One change as the slot told it, and the private memory of its process before and after."""

    told: LayerSwitch
    before_bytes: int
    after_bytes: int

    @property
    def seconds(self) -> float:
        return self.told.read_seconds + self.told.swap_seconds + self.told.return_seconds

    @property
    def returned_bytes(self) -> int:
        return self.before_bytes - self.after_bytes


def write_random_copy(model: Path) -> None:
    """An any-precision copy of the right shapes."""
    slice_ = ModelSlice(read_config(model), (0, 0), embedding=False, head=False, dtype=torch.bfloat16)
    linears = {key: getattr(parent, name) for key, (parent, name) in slice_.places(0).items()}
    shapes = {key: (int(linear.out_features), int(linear.in_features)) for key, linear in linears.items()}
    writer = ArtefactWriter(model / ANY_PRECISION_FOLDER, model_digest(model), 1, Recipe())
    writer.write(0, shapes, ((key, _random_parent(*shape)) for key, shape in shapes.items()))


def _random_parent(out_features: int, in_features: int) -> AnyParent:
    generator = torch.Generator().manual_seed(in_features)
    codes = torch.randint(0, 256, (out_features, in_features), dtype=torch.uint8, generator=generator)
    spread = in_features**-0.5
    tables = {
        bits: (torch.randn(out_features, 1 << bits, generator=generator) * spread).sort(dim=1).values.half()
        for bits in range(3, 9)
    }
    return AnyParent(codes, tables)


def plan_with(model: Path, name: FormatName) -> Plan:
    plan = plan_of(LLAMA_7B.cases[0], Model.from_folder(model), str(model))
    [replica] = plan.replicas
    [stage] = replica.stages
    stage = msgspec.structs.replace(stage, format=(name,))
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=(stage,)),))


def switch(slot: SlotProcess, bits: int) -> Switch:
    before = slot.ask(GetStatus()).private_bytes
    state = slot.set_bits(SetBits(epoch=1, replica=0, stage=0, bits={0: bits}))
    if state.phase != "switched":
        raise RuntimeError(f"{bits} bits: {state.phase}: {state.reason}")
    return Switch(state.done[0], before, slot.ask(GetStatus()).private_bytes)


def rounds(slot: SlotProcess) -> Iterator[Switch]:
    """From 8 bits and back to them, several times; the first of each way, which brings what later ones find, is left out."""
    for number in range(ROUNDS + 1):
        for bits in (4, 8, 16, 8):
            done = switch(slot, bits)
            if number:
                yield done


def longest_gap(slot: SlotProcess, leader: LeaderClient) -> tuple[float, float]:
    """Seconds between two tokens of a sequence whose layer changes four times meanwhile: the median, the longest."""
    leader.generate([greedy("warm", range(32), 8)])
    leader.send(greedy("runs", range(32), ANSWER))
    times: list[float] = []
    while len(times) < ANSWER:
        for _ in leader.events():
            times.append(time.perf_counter())
            if len(times) in SWITCH_AT:
                slot.ask(
                    SetBits(epoch=1, replica=0, stage=0, bits={0: 4 if SWITCH_AT.index(len(times)) % 2 == 0 else 8})
                )
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.median(gaps), max(gaps)


def predicted_bytes(model: Path, before: int, after: int) -> int:
    """What the planner counts for the layer at either number of bits."""
    [layer] = Model.from_folder(model).layers
    sizes = (layer_weights_bytes(layer, _FORMATS[bits], "bfloat16") for bits in (before, after))
    return next(sizes) - next(sizes)


def _way(switches: list[Switch], before: int, after: int) -> list[Switch]:
    return [each for each in switches if (each.told.bits_before, each.told.bits) == (before, after)]


def _milliseconds(name: str, values: list[float]) -> Row:
    return Row(name, 1e3 * statistics.median(values), f"ms, median of {len(values)}")


def goal_rows(model: Path, switches: list[Switch]) -> list[Row]:
    down = _way(switches, 8, 4)
    predicted = predicted_bytes(model, 8, 4)
    returned = min(each.returned_bytes for each in down)
    took = 1e3 * statistics.median(each.seconds for each in down)
    return [
        Row(
            "switch_milliseconds_per_layer",
            took,
            f"ms to read, swap and return, 8 -> 4 bits, median of {len(down)}",
            goal=MILLISECONDS_GOAL,
            lower_is_better=True,
        ),
        Row(
            "switch_memory_returned",
            returned,
            f"bytes of private memory, least of {len(down)}",
            peer="bytes that the planner predicts",
            peer_value=predicted,
            ratio=returned / predicted,
            goal=RETURNED_GOAL,
        ),
    ]


def part_rows(switches: list[Switch]) -> list[Row]:
    rows = []
    for before, after in ((8, 4), (4, 8), (8, 16), (16, 8)):
        ways = _way(switches, before, after)
        name = f"switch_{before}_{after}"
        rows += [
            _milliseconds(f"{name}_read", [each.told.read_seconds for each in ways]),
            _milliseconds(f"{name}_swap", [each.told.swap_seconds for each in ways]),
            _milliseconds(f"{name}_return", [each.told.return_seconds for each in ways]),
        ]
    return rows


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = LLAMA_7B.make(Path(folder) / "model")
        write_random_copy(model)
        plan = plan_with(model, "any8")
        with slot_processes(plan) as slots:
            [slot] = slots.values()
            leader = PipelineClient(slots).serve(plan)
            median, longest = longest_gap(slot, leader)
            switches = list(rounds(slot))
        gap = Row(
            "switch_longest_gap",
            1e3 * longest,
            "ms between tokens, 4 switches",
            "median gap",
            1e3 * median,
            longest / median,
        )
        return [*goal_rows(model, switches), *part_rows(switches), gap]


if __name__ == "__main__":
    run("precision_switch", measure)
