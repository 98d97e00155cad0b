"""Checks before anything is loaded or started, by name; all that fail are told at once.

Called by `strata up`. What is looked at is given: a check is a function that raises or yields sentences. The tokenizer is the
runtime's to read, so that check runs in a process of the runtime, beside planning.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata_operator.errors import InvalidInputError
from strata_operator.local.children import held_child
from strata_operator.local.errors import LocalError, LocalInputError
from strata_operator.observe.shards import INDEX, SINGLE, has_checkpoint, shard_problems
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER
from strata_planner.contract.plan import Plan
from strata_planner.errors import ClusterError
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Cluster
from strata_planner.units import human_bytes

RUNTIME = (sys.executable, "-m", "strata_runtime.gateway.preflight")
RUNTIME_SECONDS = 120.0


class PreflightError(LocalInputError):
    """`failures`: `name: sentence` of every check that failed; nothing was started."""

    def __init__(self, failures: Sequence[str]) -> None:
        self.failures = tuple(failures)
        super().__init__("\n".join(["nothing was started; these checks failed", *(f"  - {each}" for each in failures)]))


@dataclass(frozen=True, slots=True)
class Check:
    """`problems` gives sentences, or raises one of the errors that a user can act on."""

    name: str
    problems: Callable[[], Iterable[str] | None]

    def failures(self) -> list[str]:
        try:
            found = list(self.problems() or ())
        except (InvalidInputError, ClusterError) as error:
            found = list(error.problems)
        except LocalError as error:
            found = [str(error)]
        return [f"{self.name}: {each}" for each in found]


def failures(checks: Iterable[Check]) -> list[str]:
    """Of all checks, in their order."""
    return [sentence for check in checks for sentence in check.failures()]


def check_shards(folder: Path) -> Iterator[str]:
    """A whole checkpoint lies there, or at least a copy that slots load instead."""
    if has_checkpoint(folder):
        yield from shard_problems(folder)
    elif not (folder / ANY_PRECISION_FOLDER).is_dir():
        yield f"{folder} has neither {INDEX} nor {SINGLE}: only safetensors checkpoints are read; convert other formats first"


def check_driver(cluster: Cluster, gpus_here: int) -> Iterator[str]:
    """GPUs that the cluster names and the driver here does not list."""
    wanted = [(device.type, device.count) for node in cluster.nodes for device in node.devices if device.type != CPU]
    count = sum(number for _, number in wanted)
    if count > gpus_here:
        names = ", ".join(sorted({name for name, _ in wanted}))
        yield (
            f"the cluster has {count} GPUs ({names}), nvidia-smi lists {gpus_here} here: install the driver, or describe this "
            "machine's devices"
        )


def check_memory(plan: Plan, cluster: Cluster, free_bytes: int) -> Iterator[str]:
    """What the plan's slots on processors take together, of what is free now."""
    cpus = {(node.name, device.type) for node in cluster.nodes for device in node.devices if device.type == CPU}
    stages = [
        stage
        for replica in plan.replicas
        for stage in replica.stages
        if any((stage.node, device.type) in cpus for device in stage.devices)
    ]
    wanted = sum(stage.memory.total_bytes for stage in stages)
    if wanted > free_bytes:
        yield (
            f"the plan's {len(stages)} slots on processors take {human_bytes(wanted)} together, this machine has "
            f"{human_bytes(free_bytes)} free: end other programs, or give the devices less memoryBytes"
        )


@contextmanager
def runtime_check(model_uri: str, command: Sequence[str] = RUNTIME) -> Iterator[Check]:
    """The tokenizer's check, begun now and asked for later; its process ends with the block."""
    if model_uri.startswith("hf://"):  # downloaded by the slots
        yield Check("tokenizer", lambda: None)
        return
    with held_child(
        lambda: subprocess.Popen([*command, model_uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603  our own module
    ) as process:
        yield Check("tokenizer", lambda: _told(process))


def _told(process: subprocess.Popen[bytes]) -> list[str]:
    try:
        out, errors = process.communicate(timeout=RUNTIME_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"not read within {RUNTIME_SECONDS:g} s; is the machine very busy?"]
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return [f"the runtime could not look at the model: {' '.join(last) or f'exit code {process.returncode}'}"]
    return list(json.loads(out)["problems"])
