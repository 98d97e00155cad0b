"""What a pipeline of slots costs and gives, on a random-weight model of 246 million parameters.

`python -m benchmarks.pipeline [--json FILE]`. One thread and one core per stage, 16-bit weights everywhere, plans by the planner itself.
Every ratio is measured in one run against its peer on the same machine; runs of the two alternate, medians count.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks import memory, plan_clusters, recovery
from benchmarks.rows import Row, run
from benchmarks.slots import Served, ServedPipeline, served
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_runtime.measuring.measure import measure as measure_device
from strata_runtime.model.random_model import make_random_model

SHAPES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PROMPT, ANSWER, RUNS = 64, 64, 5


def make_model(folder: Path) -> Path:
    return make_random_model(folder / "model", "llama", dtype=torch.bfloat16, **SHAPES)


@functools.cache
def profile() -> DeviceProfile:
    """One thread of this machine, measured once."""
    return measure_device("cpu", "cpu", threads=1, compute_type="bfloat16")


def plan(model: Path, stages: int, workload: Workload, max_model_len: int = 256) -> Plan:
    """Over as many equal one-thread CPU devices as stages."""
    return make_plan(question(model, stages, workload, max_model_len)).plan


def question(model: Path, stages: int, workload: Workload, max_model_len: int = 256) -> PlanRequest:
    """What that plan answers."""
    nodes = tuple(
        Node(name=f"n{place}", devices=(Device(type="cpu", memory_bytes=4 << 30, threads=1),))
        for place in range(stages)
    )
    return PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes=nodes).with_profile(profile()),
        workload=workload,
        max_model_len=max_model_len,
        allowed_bits=(16,),
        min_stages=stages,
        max_stages=stages,
    )


def load(concurrency: int) -> Workload:
    return Workload(prompt_tokens=PROMPT, output_tokens=ANSWER, concurrency=concurrency)


def alternate(left: Callable[[], float], right: Callable[[], float], runs: int = RUNS) -> tuple[float, float]:
    """Medians of two measurements that take turns, so that a drift of the machine meets both."""
    pairs = [(left(), right()) for _ in range(runs)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def measure_overlap(model: Path, busy: dict[str, Mapping[str, float]], *, ragged: bool) -> Row:
    """Twice the sequences on twice the stages."""
    kind = " of unlike lengths" if ragged else ""
    with served(plan(model, 1, load(16))) as one, served(plan(model, 2, load(32))) as two:
        rate = _rate_of(busy, ragged=ragged)
        value, peer = alternate(
            lambda: rate(two, 32, f"2 stages, 32 sequences{kind}"),
            lambda: rate(one, 16, f"1 stage, 16 sequences{kind}"),
        )
    return Row(
        name="overlap_ragged" if ragged else "overlap",
        value=value,
        unit="tokens/s",
        peer="one stage, 16 sequences",
        peer_value=peer,
        ratio=value / peer,
        goal=1.6,
    )


def measure_hop_latency(model: Path, busy: dict[str, Mapping[str, float]]) -> Row:
    """Seconds per token of one sequence."""
    with served(plan(model, 1, load(1))) as one, served(plan(model, 2, load(1))) as two:
        rate = _rate_of(busy)
        value, peer = alternate(
            lambda: 1000 / rate(two, 1, "2 stages, 1 sequence"), lambda: 1000 / rate(one, 1, "1 stage, 1 sequence")
        )
    return Row(
        name="hop_latency",
        value=value,
        unit="ms/token",
        peer="one stage",
        peer_value=peer,
        ratio=value / peer,
        goal=1.05,
        lower_is_better=True,
    )


def measure_generate(model: Path, sequences: int, busy: dict[str, Mapping[str, float]]) -> Row:
    """Against transformers' own loop: the same model, batch, lengths and threads."""
    torch.set_num_threads(1)
    peer_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    prompts = torch.tensor([[(7 * row + place) % 1000 for place in range(PROMPT)] for row in range(sequences)])

    def generate() -> float:
        started = time.perf_counter()
        peer_model.generate(
            prompts, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return sequences * ANSWER / (time.perf_counter() - started)

    generate()
    with served(plan(model, 1, load(sequences))) as one:
        rate = _rate_of(busy)
        value, peer = alternate(lambda: rate(one, sequences, f"1 stage, {sequences} against generate"), generate)
    return Row(
        name=f"generate_{sequences}",
        value=value,
        unit="tokens/s",
        peer="transformers generate",
        peer_value=peer,
        ratio=value / peer,
        goal=1.0,
    )


def _rate_of(
    busy: dict[str, Mapping[str, float]], *, ragged: bool = False
) -> Callable[[ServedPipeline, int, str], float]:
    """Measures a pipeline after one run to warm it up; keeps the busy shares of its stages."""
    warm: set[int] = set()

    def rate(pipeline: ServedPipeline, sequences: int, label: str) -> float:
        if id(pipeline) not in warm:
            warm.add(id(pipeline))
            pipeline.measure(sequences, PROMPT, ANSWER, ragged=ragged)
        result: Served = pipeline.measure(sequences, PROMPT, ANSWER, ragged=ragged)
        busy[label] = result.busy
        return result.tokens_per_second

    return rate


def measure() -> list[Row]:
    busy: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        rows = [
            measure_overlap(model, busy, ragged=False),
            measure_overlap(model, busy, ragged=True),
            measure_hop_latency(model, busy),
            measure_generate(model, 1, busy),
            measure_generate(model, 16, busy),
        ]
    print("busy share of each stage:")
    for label, shares in busy.items():
        print(f"  {label}: " + ", ".join(f"{slot} {share:.0%}" for slot, share in shares.items()))
    return [*rows, *memory.measure(), *recovery.measure(), *plan_clusters.measure()]


if __name__ == "__main__":
    run("pipeline", measure)
