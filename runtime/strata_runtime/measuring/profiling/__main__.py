"""Measures a model's layers on this device: `python -m strata_runtime.measuring.profiling --model FOLDER --threads N [--formats A,B] [--output FILE]`.

Started by `strata profile`. Prints the file of the finished LatencyProfile, kept in `${XDG_CACHE_HOME:-~/.cache}/strata` unless --output
names another. A profile that is there is extended by the formats that it lacks. Shows its progress on stderr. What an interrupted run has
measured is kept beside the file and taken up again; `--kept` measures nothing and prints the file only if it is there.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import FORMAT_NAMES, ComputeType, FormatName
from strata_planner.contract.kv import KV_BITS
from strata_planner.contract.latencies import LatencyProfile, ProfiledDevice, SharedLayers, StrategyPoint
from strata_planner.contract.store import cache_folder, write_whole
from strata_planner.contract.strategies import why_not_switched
from strata_planner.contract.values import ContractError
from strata_runtime.command_line import positive
from strata_runtime.device import gpu_libraries, gpu_names, processor_name
from strata_runtime.errors import InputError
from strata_runtime.kernels.native import build
from strata_runtime.measuring.measure import measure, store_of
from strata_runtime.measuring.profiling.fields import read_fields
from strata_runtime.measuring.profiling.grid import FORMATS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        fields = read_fields(options.model)
        device = _device(options)
        file = options.output or _place(fields, device, options)
        kept = _kept(file)
        if options.kept and kept is None:
            return 1
        if not options.kept:
            _complete(options, fields, device, (file, kept))
    except (InputError, UnsupportedModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{file}\n")
    return 0


def _complete(
    options: argparse.Namespace,
    fields: dict[str, Any],
    device: ProfiledDevice,
    place: tuple[Path, LatencyProfile | None],
) -> None:
    """Measures what the file lacks of the formats that are asked for, or all of these (`--fresh`). `place`: the file and what it holds."""
    if options.ranks > 1 and options.device != "cpu":
        raise InputError(
            "--ranks measures stages that several processors share, not yet those of several GPUs: leave it out"
        )
    file, base = place
    wanted: tuple[FormatName, ...] = options.formats
    if base is not None:
        _check_same(base, device, options, file)
        base = base.without(wanted) if options.fresh else base
    missing = tuple(name for name in wanted if base is None or name not in base.layers)
    if missing:
        _measure(options, fields, device, file, (missing, base))
    if options.ranks > 1:
        _measure_ranks(options, fields, file)


def _check_same(base: LatencyProfile, device: ProfiledDevice, options: argparse.Namespace, file: Path) -> None:
    """Only a file that --output names can be of something else."""
    found = (base.device, base.compute_type, base.kv_bits, base.company)
    wanted = (device, options.compute_type, options.kv_bits, options.company)
    if found != wanted:
        raise InputError(
            f"{file} is a profile {_told(*found)}, and one {_told(*wanted)} is to be measured: name another file with --output, or remove this one"
        )


def _told(device: ProfiledDevice, compute_type: str, kv_bits: int, company: int) -> str:
    processor = hashlib.sha256(device.processor.encode()).hexdigest()[:6]
    return (
        f"of {device.threads} threads of '{device.type}' (processor {processor}, torch {device.torch}, kernels {device.library[:6]}) in "
        f"{compute_type} with keys and values of {kv_bits} bits and {company} others beside it"
    )


def _measure(
    options: argparse.Namespace,
    fields: dict[str, Any],
    device: ProfiledDevice,
    file: Path,
    work: tuple[tuple[FormatName, ...], LatencyProfile | None],
) -> None:
    """`work`: the formats to measure, and the profile that they come to."""
    import torch  # noqa: PLC0415 -- seconds to import, and a kept profile needs none of it

    from strata_runtime.measuring.profiling.notes import Notes  # noqa: PLC0415
    from strata_runtime.measuring.profiling.survey import Subject, Survey  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    keep_rates(options.device, options.threads, options.compute_type)
    subject = Subject(
        fields,
        device,
        torch.device(options.device),
        options.compute_type,
        options.quick,
        formats=work[0],
        company=options.company,
        kv_bits=options.kv_bits,
    )
    notes = Notes(file.with_suffix(".notes"), subject.key)
    if notes.resumed:
        sys.stderr.write(f"going on after {notes.resumed} measurements of an earlier run\n")
    done = False
    try:
        with _bar() as progress:
            profile = Survey(subject, notes, progress, base=work[1]).run()
        write_whole(file, profile.encode() + b"\n")
        done = True
    finally:
        notes.close(done=done)


def _measure_ranks(options: argparse.Namespace, fields: dict[str, Any], file: Path) -> None:
    """Adds to the file what layers take that so many ranks share, and the strategies of theirs, unless it is there."""
    profile = LatencyProfile.decode(file.read_bytes())
    known = profile.shared_by(options.ranks).formats
    missing = [name for name in options.formats if options.fresh or name not in known]
    if missing:
        profile = _with_shared(options, fields, profile, missing)
        write_whole(file, profile.encode() + b"\n")
    name = _switched_format(options, fields)
    switched = [each for each in profile.strategies if (each.ranks, each.format) == (options.ranks, name)]
    if name is not None and (options.fresh or not switched):
        others = tuple(each for each in profile.strategies if each not in switched)
        points = _strategies(options, fields, name)
        write_whole(file, msgspec.structs.replace(profile, strategies=(*others, *points)).encode() + b"\n")


def _with_shared(
    options: argparse.Namespace, fields: dict[str, Any], profile: LatencyProfile, formats: Sequence[FormatName]
) -> LatencyProfile:
    from strata_runtime.measuring.profiling.shared_layers import SharedSubject, measure_shared  # noqa: PLC0415 -- see _measure

    subject = SharedSubject(
        fields, options.ranks, options.threads, options.compute_type, options.kv_bits, quick=options.quick
    )
    with _bar() as progress:
        points = measure_shared(subject, formats, profile, progress)
    return profile.with_shared(SharedLayers(options.ranks, tuple(points)))


def _switched_format(options: argparse.Namespace, fields: dict[str, Any]) -> FormatName | None:
    """The first of the formats in which layers of this model switch their strategy; None: all of them run Megatron alone."""
    names = [name for name in options.formats if not why_not_switched(str(fields["model_type"]), (name,), options.type)]
    return names[0] if names else None


def _strategies(options: argparse.Namespace, fields: dict[str, Any], name: FormatName) -> Sequence[StrategyPoint]:
    from strata_runtime.measuring.profiling import strategies  # noqa: PLC0415 -- see _measure
    from strata_runtime.measuring.profiling.stage import StageSpec  # noqa: PLC0415

    lengths = strategies.lengths_of(fields, quick=options.quick)
    formats = (name,) * strategies.LAYERS
    spec = StageSpec(formats, options.compute_type, lengths[-1], lengths[-1], kv_bits=options.kv_bits)
    with strategies.switching_stage(fields, options.ranks, spec, options.threads) as stage, _bar() as progress:
        return strategies.measure_strategies(stage, lengths, progress)


def keep_rates(device: str, threads: int, compute_type: ComputeType) -> None:
    """Which kernel runs for how many tokens is measured with a device's rates: slots go by it, so what is profiled must too."""
    store = store_of(device, threads, compute_type)
    if store.load() is None:
        store.save(measure(device, device, threads, compute_type))


def _kept(file: Path) -> LatencyProfile | None:
    """What the file holds, if this release reads it."""
    try:
        return LatencyProfile.decode(file.read_bytes())
    except (OSError, ContractError):
        return None


def _device(options: argparse.Namespace) -> ProfiledDevice:
    """With all software that multiplies there."""
    processor, library = processor_name(), build.digest()
    if options.device == "cuda":
        processor = f"{gpu_names()} {processor}"
        library = " ".join([library, *(f"{name} {version}" for name, version in gpu_libraries().items())])
    return ProfiledDevice(options.type, processor, options.threads, metadata.version("torch"), library)


def _place(fields: dict[str, Any], device: ProfiledDevice, options: argparse.Namespace) -> Path:
    """One file for all that makes a profile differ; not the formats: it has those that anybody asked for."""
    where = [getattr(device, name) for name in device.__struct_fields__]
    told = json.dumps([fields, where, options.compute_type, options.kv_bits, options.company], sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    return cache_folder() / f"latency-{digest}-{device.threads}.json"


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
        prog="python -m strata_runtime.measuring.profiling", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json; weights are not needed")
    parser.add_argument("--threads", type=positive, default=1, help="threads that a stage will compute with")
    parser.add_argument("--type", default="cpu", help="the device type that the profile is for")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="bfloat16")
    parser.add_argument(
        "--formats",
        type=_formats,
        default=FORMATS,
        help="of weights, as dense,any4,any3; without it dense,int8,int4,int3",
    )
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, default=16, help="of keys and values")
    parser.add_argument("--output", type=Path, help="write the profile to this file")
    parser.add_argument(
        "--company", type=int, default=0, help="processes that decode meanwhile: the other slots of this machine"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        help="also layers that so many devices like this one share, and the strategies of such a stage",
    )
    parser.add_argument("--quick", action="store_true", help="a shorter grid: steps of at most 512 tokens")
    parser.add_argument("--fresh", action="store_true", help="measure these formats again even if they are kept")
    parser.add_argument("--kept", action="store_true", help="measure nothing; exit 1 if no profile is kept")
    return parser


def _formats(text: str) -> tuple[FormatName, ...]:
    names = dict.fromkeys(part.strip() for part in text.split(","))
    unknown = sorted(set(names) - set(FORMAT_NAMES))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: the formats are {', '.join(FORMAT_NAMES)}")
    return tuple(name for name in FORMAT_NAMES if name in names)


if __name__ == "__main__":
    sys.exit(main())
