"""What several ranks bring a stage: two over one, two over one of two threads, on a shape of a billion parameters' width; and sums over Gloo's.

`python -m benchmarks.ranks [--small] [--json FILE]`. Real slots with random weights, one core a rank; `--small`: the 246M shape of `benchmarks.pipeline`.
`memory_of_two_cores`: what two cores read at once over what one does, in the same turns: no more can `tp2_decode_1` gain where one core is bound by the memory.
Also three ranks of eight key heads: what they hold of what three equal devices have, and how far their logits are from those of one; and,
simulated, requests that are routed to replicas of unlike speeds by planned capacity and load, over in turn.
"""

import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from msgspec import structs

from benchmarks import pipeline
from benchmarks.engine_contenders import STREAM, Cell, Stream
from benchmarks.peers.process import PeerProcess
from benchmarks.rows import Row, run
from benchmarks.slots import ServedPipeline, free_address, served
from strata_planner.contract.frames import Segment
from strata_planner.contract.plan import DeviceRef, MicroBatch, Plan
from strata_planner.contract.roles import roles_of
from strata_planner.question.workload import Workload
from strata_planner.simulate import Hop, Limits, ReplicaModel, Request, StageModel, simulate
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.model.random_model import make_random_model
from strata_runtime.ranks.shared_memory import SharedMemory, make_segment
from strata_runtime.slot.role_cache import cache_of

LARGE = {  # layers of TinyLlama: 8 of 22, so that three copies of it fit beside each other
    **pipeline.SHAPES,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
RANKS, RUNS = 2, 5
PROMPT, ANSWER, PREFILL = 64, 48, 512
Measured = Callable[[ServedPipeline], float]


def divided(plan: Plan, ranks: int) -> Plan:
    """The plan with so many ranks in its one stage."""
    (replica,) = plan.replicas
    (stage,) = replica.stages
    usable = stage.devices[0].usable_bytes
    devices = tuple(DeviceRef(type="cpu", index=index, usable_bytes=usable) for index in range(ranks))
    stage = structs.replace(stage, devices=devices, tensor_parallel=ranks)
    return structs.replace(plan, replicas=(structs.replace(replica, stages=(stage,)),))


def decode(sequences: int) -> Measured:
    return lambda pipeline: pipeline.listen(sequences, PROMPT, ANSWER).decode_rate


def prefill(pipeline: ServedPipeline) -> float:
    return PREFILL / pipeline.listen(1, PREFILL, 2).prompts_seconds


def sweep(stack: ExitStack, model: Path, threads: int) -> Callable[[], float]:
    """Bytes a second that so many cores read of a memory that is in no cache."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cores = sorted(os.sched_getaffinity(0))[:threads]
    process = PeerProcess(STREAM, Path(sys.executable), model, 16, cores, scratch)
    stack.callback(process.close)
    return lambda: Stream(process).rate(Cell(1, 1, 1))


def measure_products(model: Path) -> list[Row]:
    whole = pipeline.plan(model, 1, Workload(PREFILL, ANSWER, 16), PREFILL + ANSWER + 16)
    with ExitStack() as stack:
        swept = sweep(stack, model, RANKS), sweep(stack, model, 1)
        two, one, threads = (
            stack.enter_context(served(plan, count, bound=False))
            for plan, count in ((divided(whole, RANKS), 1), (whole, 1), (whole, RANKS))
        )
        rows = []
        for cell, rate, goal in (
            ("decode_1", decode(1), 1.6),
            ("decode_16", decode(16), 1.6),
            ("prefill", prefill, 1.7),
        ):
            binds = swept if cell == "decode_1" else ()  # the memory
            turns = [(rate(two), rate(one), rate(threads), *(read() for read in binds)) for _ in range(RUNS)]
            shared, alone, threaded, *memory = (statistics.median(each) for each in zip(*turns, strict=True))
            rows.append(Row(f"tp2_{cell}", shared, "tokens/s", "one rank", alone, shared / alone, goal))
            ratio = shared / threaded
            rows.append(Row(f"tp2_over_threads2_{cell}", shared, "tokens/s", "of two threads", threaded, ratio, 0.95))
            if memory:
                both, single = (each / 1e9 for each in memory)
                rows.append(Row("memory_of_two_cores", both, "GB/s", "one core", single, both / single))
        return rows


def _sums(segment: int, rank: int, port: int, report: "Callable[[dict[int, tuple[float, float]]], None]") -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    shared = SharedMemory(segment, rank, RANKS)
    taken = {}
    for size in (4 << 10, 256 << 10):
        items = torch.zeros(size // 4)
        ours, theirs = (
            statistics.median(_seconds(partial(reduce, items)) for _ in range(300))
            for reduce in (shared.all_reduce, torch.distributed.all_reduce)
        )
        taken[size] = (ours, theirs)
    torch.distributed.destroy_process_group()
    if rank == 0:
        report(taken)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_sums() -> list[Row]:
    context = get_context("fork")
    answers = context.Queue()
    segment, port = make_segment(RANKS), free_address().control_port
    ranks = [context.Process(target=_sums, args=(segment, rank, port, answers.put)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    taken = answers.get(timeout=120)
    for rank in ranks:
        rank.join()
    os.close(segment)
    return [
        Row(
            f"all_reduce_us_{size >> 10}_kb",
            ours * 1e6,
            "us",
            "Gloo",
            theirs * 1e6,
            ours / theirs,
            goal,
            lower_is_better=True,
        )
        for (size, (ours, theirs)), goal in zip(taken.items(), (0.1, 0.5), strict=True)
    ]


UNEVEN = {  # 8 key heads for 3 ranks, a vocabulary and an MLP whose tiles do not divide either
    **pipeline.SHAPES,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
UNEVEN_RANKS = 3


def measure_uneven(folder: Path) -> list[Row]:
    """In float32, ranks as threads. What each holds: weights of layers, keys and values."""
    model = make_random_model(folder / "uneven", "llama", dtype=torch.float32, **UNEVEN)
    plan = pipeline.plan(model, 1, Workload(PROMPT, ANSWER, 4), PROMPT + ANSWER)
    ((role,),) = roles_of(structs.replace(plan, compute_type="float32")).values()
    tokens = torch.arange(PROMPT) * 37 % UNEVEN["vocab_size"]
    segment = Segment(0, 0, PROMPT, PROMPT, tuple(range(-(-PROMPT // role.page_tokens))))

    def computed(collectives: SharedMemory | None) -> tuple[torch.Tensor, int]:
        stage = load_stage(role, model, lambda *_: None, torch.device("cpu"), LoadOptions(collectives=collectives))
        cache = cache_of(role, stage)
        linears = [linear for layer in range(stage.num_layers) for linear in stage.linears(layer).values()]
        weights = sum(weight.nbytes for linear in linears for weight in linear.parameters())
        return stage.forward(tokens, cache.plan([segment])), weights + cache.bytes

    whole, _ = computed(None)
    shared = make_segment(UNEVEN_RANKS)
    with ThreadPoolExecutor(UNEVEN_RANKS) as threads:
        ranks = [SharedMemory(shared, rank, UNEVEN_RANKS) for rank in range(UNEVEN_RANKS)]
        logits, held = zip(*threads.map(computed, ranks), strict=True)
    os.close(shared)
    error = max(float((each - whole).abs().max()) for each in logits)
    room = UNEVEN_RANKS * max(held)
    used = Row("uneven_memory", sum(held) / 1e6, "MB", "three times the fullest", room / 1e6, sum(held) / room, 0.9)
    far = Row("uneven_logits", error, "of logits", "one rank", 1.0, error, 1e-5, lower_is_better=True)
    return [used, far]


FAST, SLOW, WITHIN_SECONDS, REQUESTS = 3.0, 1.0, 12.0, 2000


def simulate_routing() -> Row:
    """Two replicas of speeds 3 to 1 under three quarters of what both can do: requests answered in time, beside those sent in turn."""

    def replica(speed: float) -> ReplicaModel:
        limits = Limits(MicroBatch(1, 16, 512), 16, 1 << 16, 4096)
        stage = StageModel(lambda batch: (0.02 + 2e-4 * batch.tokens) / speed, Hop())
        return ReplicaModel((stage,), limits, tokens_per_second=speed)

    turn = itertools.cycle(range(2))
    draw = random.Random(1)
    at, trace = 0.0, []
    for _ in range(REQUESTS):
        at += draw.expovariate(15.0)
        trace.append(Request(at, draw.randint(64, 512), draw.randint(16, 128)))
    replicas = [replica(FAST), replica(SLOW)]
    routed = simulate(replicas, trace).attainment_of_latency(WITHIN_SECONDS)
    in_turn = simulate(replicas, trace, routing=lambda _: next(turn)).attainment_of_latency(WITHIN_SECONDS)
    return Row("routing_simulated", routed, "in time", "in turn", in_turn, routed / in_turn, 1.3)


def measure(*, small: bool = False) -> list[Row]:
    rows = measure_sums()  # forks: before anything else has used torch's threads
    rows.append(simulate_routing())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shapes = pipeline.SHAPES if small else LARGE
        rows += measure_uneven(Path(name))
        rows += measure_products(make_random_model(folder, "llama", dtype=torch.bfloat16, **shapes))
    return rows


if __name__ == "__main__":
    rest = [each for each in sys.argv[1:] if each != "--small"]
    run("ranks", partial(measure, small="--small" in sys.argv), rest)
