"""Who takes part in `benchmarks.engine`: our slot under a plan, the peers in their processes, and a sweep of the memory."""

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import structs

from benchmarks.engine_rows import CELLS, MEMORY, OURS, ROUNDED
from benchmarks.peers.environments import PEERS, NotInstalledError, Peer, python_of
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.stream_peer import BYTES as SWEPT_BYTES
from benchmarks.slots import ServedPipeline
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan
from strata_planner.costs.memory import embedding_bytes, kv_bytes_per_token, layer_weights_bytes
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_runtime.measuring.measure import measure as measure_device

STREAM = Peer("stream", MEMORY, "stream_peer", {})
LONGEST = 640
DEVICE_BYTES = 4 << 30
ANY_PRECISION_BITS = (3, 4)  # of other bits the plan's default is served


class Cell(NamedTuple):
    """Sequences at once, tokens of each prompt and of each answer."""

    sequences: int
    prompt: int
    answer: int

    def rate(self, first: float, last: float) -> float:
        """Tokens a second by when all had their first and their last: of the prompts where there is no more, else of what follows the first."""
        if self.answer == 1:
            return self.sequences * self.prompt / first
        return self.sequences * (self.answer - 1) / (last - first)


SIZES = {"decode_1": Cell(1, 64, 96), "decode_16": Cell(16, 64, 64), "prefill_512": Cell(1, 512, 1)}
assert tuple(SIZES) == CELLS


class Contender(Protocol):
    """One engine, loaded."""

    title: str
    setting: str

    def rate(self, cell: Cell) -> float:
        """Tokens a second. Raises PeerError."""


class Ours:
    """A slot that serves a plan. Its prompts may take more than one step: decoding counts while all sequences do nothing else."""

    setting = ""

    def __init__(self, pipeline: ServedPipeline, *, rounds: bool = False) -> None:
        """`rounds`: its products may round activations to 8 bits."""
        self.title = ROUNDED if rounds else OURS
        self._pipeline = pipeline

    def rate(self, cell: Cell) -> float:
        heard = self._pipeline.listen(*cell)
        return cell.rate(heard.prompts_seconds, 0) if cell.answer == 1 else heard.decode_rate


class Theirs:
    """A peer in its process."""

    def __init__(self, process: PeerProcess) -> None:
        self.title, self.setting = process.title, ""
        self._process = process

    def rate(self, cell: Cell) -> float:
        first, last, self.setting = self._process.run(*cell)
        return cell.rate(first, last)


class Stream:
    """The sweep of the memory: bytes a second."""

    title, setting = MEMORY, ""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    def rate(self, cell: Cell) -> float:
        seconds, *_ = self._process.run(*cell)
        return SWEPT_BYTES / seconds


class Peers:
    """The peers that are asked for, installed under `home`; `reasons`: why some are not here, by what people call them."""

    def __init__(self, names: Sequence[str], home: Path) -> None:
        self.reasons: dict[str, str] = {}
        self._installed: list[tuple[Peer, Path]] = []
        for peer in PEERS:
            if peer.name not in names:
                self.reasons[peer.title] = "not asked for"
                continue
            try:
                self._installed.append((peer, python_of(peer, home)))
            except NotInstalledError as error:
                self.drop(peer.title, str(error))

    def drop(self, title: str, reason: str) -> None:
        print(f"{title} is not here: {reason}", file=sys.stderr, flush=True)
        self.reasons[title] = reason

    @contextmanager
    def started(self, model: Path, bits: int, threads: int, scratch: Path) -> Iterator[list[Contender]]:
        """Those that have this format, and the sweep, each on as many processors as threads."""
        cores = sorted(os.sched_getaffinity(0))[:threads]
        able = [(peer, python) for peer, python in self._installed if bits in peer.formats]
        with ExitStack() as stack:
            found: list[Contender] = []
            for peer, python in [(STREAM, Path(sys.executable)), *able]:
                try:
                    process = PeerProcess(peer, python, model, bits, cores, scratch)
                except PeerError as error:
                    self.drop(f"{peer.title} at {bits} bits on {threads} threads", str(error))
                    continue
                stack.callback(process.close)
                found.append(Stream(process) if peer is STREAM else Theirs(process))
            yield found


@functools.cache
def profile(threads: int) -> DeviceProfile:
    """So many threads of this machine, measured once."""
    return measure_device("cpu", "cpu", threads=threads, compute_type="bfloat16")


def plan(model: Path, cell: Cell, bits: int, threads: int, *, rounds: bool = False) -> Plan:
    """One stage on one device of so many threads, for the load of a cell. `rounds`: activations to 8 bits, where that is faster."""
    device = Device(type="cpu", memory_bytes=DEVICE_BYTES, threads=threads)
    request = PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=structs.replace(
            Model.from_folder(model), head_format="dense" if bits == 16 else "int8"
        ),  # as `strata up`
        cluster=Cluster(nodes=(Node(name="n0", devices=(device,)),)).with_profile(profile(threads)),
        workload=Workload(cell.prompt, cell.answer, cell.sequences),
        max_model_len=LONGEST,
        allowed_bits=(bits,),
        activation_bits=(8, 16) if rounds else (16,),
        max_stages=1,
        method="anyPrecision" if bits in ANY_PRECISION_BITS else "roundToNearest",
    )
    return make_plan(request).plan


def bytes_a_token(model: Path, made: Plan) -> float:
    """What a sequence of `decode_1` reads for a token: every layer, the head, and its keys and values half-way through its answer."""
    shapes, cell = structs.replace(Model.from_folder(model), head_format=made.head_format), SIZES["decode_1"]
    (stage,) = made.replicas[0].stages
    total = embedding_bytes(shapes, embedding=False, head=True, compute_type="bfloat16")
    for layer, name in zip(shapes.layers, stage.format, strict=True):
        total += layer_weights_bytes(layer, name, "bfloat16")
        total += (cell.prompt + cell.answer // 2) * kv_bytes_per_token(layer, stage.kv_bits, "bfloat16")
    return total


def described(made: Plan) -> str:
    """Its formats, and what a step carries."""
    (replica,) = made.replicas
    (stage,) = replica.stages
    held = ", ".join(f"{stage.format.count(name)} layers {name}" for name in dict.fromkeys(stage.format))
    batch = replica.micro_batch
    return f"{held}; steps of {batch.decode} sequences and at most {batch.max_step_tokens} tokens"
