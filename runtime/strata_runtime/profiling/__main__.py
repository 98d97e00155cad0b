"""Measures a model's layers on this device: `python -m strata_runtime.profiling --model FOLDER --threads N [--output FILE]`.

Started by `strata profile`. Prints the file of the finished LatencyProfile, kept in `${XDG_CACHE_HOME:-~/.cache}/strata` unless --output
names another. Shows its progress on stderr. What an interrupted run has measured is kept beside the file and taken up again;
`--kept` measures nothing and prints the file only if it is there.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata_planner.contract.formats import ComputeType
from strata_planner.contract.latencies import LatencyProfile, ProfiledDevice
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError
from strata_runtime.measure import positive, processor_name
from strata_runtime.profiling.fields import read_fields


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        fields = read_fields(options.model)
        device = ProfiledDevice(options.type, processor_name(), options.threads, metadata.version("torch"))
        file = options.output or _place(fields, device, options.compute_type, options.company)
        if options.fresh or not _kept(file):
            if options.kept:
                return 1
            _measure(options, fields, device, file)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{file}\n")
    return 0


def _measure(options: argparse.Namespace, fields: dict[str, Any], device: ProfiledDevice, file: Path) -> None:
    import torch  # noqa: PLC0415 -- seconds to import, and a kept profile needs none of it

    from strata_runtime.profiling.notes import Notes  # noqa: PLC0415
    from strata_runtime.profiling.survey import Subject, Survey  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    subject = Subject(
        fields, device, torch.device(options.device), options.compute_type, options.quick, company=options.company
    )
    notes = Notes(file.with_suffix(".notes"), subject.key)
    if notes.resumed:
        sys.stderr.write(f"going on after {notes.resumed} measurements of an earlier run\n")
    done = False
    try:
        with _bar() as progress:
            profile = Survey(subject, notes, progress).run()
        _write(file, profile)
        done = True
    finally:
        notes.close(done=done)


def _write(file: Path, profile: LatencyProfile) -> None:
    """Replaces the file in one move."""
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(profile.encode() + b"\n")
    scratch.replace(file)


def _kept(file: Path) -> bool:
    """Whether the file holds a profile that this release reads."""
    try:
        LatencyProfile.decode(file.read_bytes())
    except (OSError, ContractError):
        return False
    return True


def _place(fields: dict[str, Any], device: ProfiledDevice, compute_type: ComputeType, company: int) -> Path:
    """One file for all that makes a profile differ."""
    told = json.dumps([fields, device.type, device.processor, device.torch, compute_type, company], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "strata" / f"latency-{digest}-{device.threads}.json"


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the time left on a terminal; elsewhere a line for every tenth."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what)


def _lines() -> Callable[[int, int, str], None]:
    said = 0

    def line(done: int, total: int, what: str) -> None:
        nonlocal said
        if done * 10 // total > said:
            said = done * 10 // total
            sys.stderr.write(f"measured {said}0 %: {what}\n")

    return line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.profiling", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json; weights are not needed")
    parser.add_argument("--threads", type=positive, default=1, help="threads that a stage will compute with")
    parser.add_argument("--type", default="cpu", help="the device type that the profile is for")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="bfloat16")
    parser.add_argument("--output", type=Path, help="write the profile to this file")
    parser.add_argument(
        "--company", type=int, default=0, help="processes that decode meanwhile: the other slots of this machine"
    )
    parser.add_argument("--quick", action="store_true", help="a shorter grid: steps of at most 512 tokens")
    parser.add_argument("--fresh", action="store_true", help="measure again even if a profile is kept")
    parser.add_argument("--kept", action="store_true", help="measure nothing; exit 1 if no profile is kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
