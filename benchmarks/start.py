"""Starting a deployment: how long until it answers, where that time goes, and the memory that it then takes.

`python -m benchmarks.start [--json FILE] [--starts 3]`, two minutes. A random Llama of 246 million parameters (`benchmarks.pipeline`'s, 492 MB) under
`strata up` with one stage, files in the page cache and this machine's processor measured before: one start that is not counted sees to both. Memory
is that of the last start after 16 streams have been answered twice; pages that several processes share count once (PSS, proc_pid_smaps(5)).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import pipeline
from benchmarks.deployment import Deployment, Wishes, deployed
from benchmarks.engine_serving import DEVICE_BYTES, held_bytes, http_rate
from benchmarks.rows import Row, run
from benchmarks.truth import write_tokenizer

STARTS, STREAMS = 3, 16
SLOT_GOAL, DEPLOYMENT_GOAL, SECONDS_GOAL = 300, 1200, 3.0
_TITLE = "where the start's time went"


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes: resident, its share of that, what is its own, and the most that was resident."""

    rss: int
    pss: int
    own: int
    peak: int

    @property
    def peak_pss(self) -> int:
        """The kernel keeps no mark of it: what is shared now was shared then."""
        return self.peak - (self.rss - self.pss)


def memory_of(pid: int) -> Memory:
    """Mapped files included (proc_pid_smaps(5), proc_pid_status(5))."""
    rollup = _kilobytes(Path(f"/proc/{pid}/smaps_rollup"))
    own = rollup["Private_Dirty"] + rollup["Private_Clean"]
    return Memory(rollup["Rss"], rollup["Pss"], own, _kilobytes(Path(f"/proc/{pid}/status"))["VmHWM"])


def _kilobytes(file: Path) -> Mapping[str, int]:
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}


def rows_of(seconds: Sequence[float], slot: Memory, held: int, deployment_bytes: int) -> list[Row]:
    """`held`: weights and KV of the slot's plan."""
    what, peer = "MB beyond weights and KV", ("weights and KV, MB", held / 1e6)
    over, resident = (slot.peak_pss - held) / 1e6, (slot.peak - held) / 1e6
    return [
        Row("slot_memory", over, f"{what}, at its peak", *peer, goal=SLOT_GOAL, lower_is_better=True),
        Row("slot_resident", resident, f"{what}, pages shared with others too", *peer),
        Row(
            "deployment_memory", deployment_bytes / 1e6, "MB, all processes", goal=DEPLOYMENT_GOAL, lower_is_better=True
        ),
        Row(
            "ready_seconds",
            statistics.median(seconds),
            f"s, median of {len(seconds)} from {min(seconds):.2f} to {max(seconds):.2f}",
            goal=SECONDS_GOAL,
            lower_is_better=True,
        ),
    ]


def table(found: Mapping[str, Memory]) -> Table:
    shown = Table(title="memory of each process, MB", title_justify="left")
    shown.add_column("process")
    for column in ("resident", "its share", "its own", "peak"):
        shown.add_column(column, justify="right")
    for name, memory in found.items():
        cells = (memory.rss, memory.pss, memory.own, memory.peak)
        shown.add_row(name, *(f"{value / 1e6:,.0f}" for value in cells))
    return shown


def measure(starts: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = pipeline.make_model(folder)
        write_tokenizer(model, pipeline.SHAPES["vocab_size"])
        wishes = Wishes(
            model,
            max_model_len=256,
            prompt_tokens=64,
            output_tokens=64,
            concurrency=STREAMS,
            compute_type="bfloat16",
            device_bytes=DEVICE_BYTES,
            stages=1,
        )
        seconds = []
        for start in range(starts + 1):
            begun = time.monotonic()
            with deployed(folder, wishes) as deployment:
                seconds.append(time.monotonic() - begun)
                sys.stderr.write(f"start {start}: {seconds[-1]:.2f} s\n")
                if start < starts:
                    continue
                found, held = _after_serving(deployment)
        _, _, phases = deployment.output.read_text().partition(_TITLE)
    print(f"{_TITLE}, the last time{phases.partition('ready: ')[0]}")
    Console(width=150).print(table(found))
    (slot,) = (memory for process, memory in found.items() if process.startswith("bench"))
    return rows_of(seconds[1:], slot, held, sum(memory.pss for memory in found.values()))


def _after_serving(deployment: Deployment) -> tuple[dict[str, Memory], int]:
    """Memory of every process by name, and what the slot's weights and KV take."""
    for turn in range(2):
        http_rate(deployment.port, STREAMS, turn)
    names = {process.pid: name for name, process in deployment.await_processes().items()}
    supervisor = psutil.Process(deployment.process.pid)
    pids = [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
    return {names.get(pid, str(pid)): memory_of(pid) for pid in pids}, held_bytes(deployment.record.plan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", add_help=False)
    parser.add_argument("--starts", type=int, default=STARTS)
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("start", partial(measure, chosen.starts), rest)


if __name__ == "__main__":
    main()
