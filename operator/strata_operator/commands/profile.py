"""`strata profile`: has the runtime measure a model's layers in a process of its own; and finds such profiles for `plan` and `up`.

Measuring needs torch, which this package never imports. Profiles are kept beside measured rates, one for all that makes one differ; the formats in it
are those that anybody asked for so far. A deployment asks for those that its plans may choose from.
"""

import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from strata_operator.api.load import read_text
from strata_operator.commands.inputs import Question, read_question
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_operator.local.run import leave_on_signals, log_to
from strata_operator.observe.model_files import local_folder, read_config
from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.formats import ANY_PRECISION, FORMAT_NAMES, ComputeType, FormatName
from strata_planner.contract.kv import KV_BITS
from strata_planner.contract.latencies import LatencyProfile
from strata_planner.contract.processors import cores
from strata_planner.contract.quantization import CONFIG_FIELD
from strata_planner.contract.store import write_whole
from strata_planner.contract.values import ContractError
from strata_planner.costs.fitted import FittedLatency
from strata_planner.costs.source import Rates
from strata_planner.question.catalogue import CPU
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest

log = logging.getLogger(__name__)

PROFILE = (sys.executable, "-m", "strata_runtime.measuring.profiling")
_KEPT_SECONDS = 60
_COMPUTE_TYPE: ComputeType = "bfloat16"  # where no deployment says it


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The flags of `strata profile`. One of `deployment` and `model`; `threads` 0: those of the deployment's CPU devices, else all.
    `formats` empty and `kv_bits` None: those of the deployment, else of an ordinary one.
    """

    deployment: Path | None
    cluster: Path | None
    model: Path | None
    threads: int
    device: str
    device_type: str
    output: Path | None
    quick: bool
    fresh: bool
    company: int = 0
    formats: tuple[str, ...] = ()
    kv_bits: int | None = None
    ranks: int = 1  # of a stage whose strategies are timed too


@dataclass(frozen=True, slots=True)
class _Subject:
    """What one file is of, formats aside."""

    model: Path
    threads: int
    compute_type: ComputeType
    kv_bits: int

    def command(self) -> list[str]:
        words = [
            "--model",
            str(self.model),
            "--threads",
            str(max(1, self.threads)),
            "--compute-type",
            self.compute_type,
        ]
        return [*PROFILE, *words, "--kv-bits", str(self.kv_bits)]


def run(options: ProfileOptions) -> None:
    """Raises what `commands.errors` knows; the runtime's own sentence, where it refuses, is on stderr already."""
    log_to(Console(stderr=True))
    leave_on_signals()
    for command in _commands(options):
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own module
        if ended.returncode == 2:
            raise InvalidInputError("strata profile", ["not measured, for the reason above"])
        if ended.returncode:
            raise LocalError(f"measuring failed (exit {ended.returncode}); start again to go on where it stopped")
        file = Path(ended.stdout.strip().splitlines()[-1])
        console = Console()
        console.print(shown(judged(file)))
        console.print(f"kept in {file}", soft_wrap=True)


def judged(file: Path) -> LatencyProfile:
    """The profile with the errors of its fits at points left out, which are written into the file; those that are there already stand."""
    profile = LatencyProfile.decode(file.read_bytes())
    known = {name.partition(" ")[0] for name in profile.leave_one_out}
    new = [name for name in profile.layers if name not in known]
    if not new:
        return profile
    errors = {**profile.leave_one_out, **FittedLatency(profile.of(new)).leave_one_out}
    judged = msgspec.structs.replace(profile, leave_one_out=errors)
    write_whole(file, judged.encode() + b"\n")
    return judged


def shown(profile: LatencyProfile) -> Table:
    """A row per format and phase: how many points, and how well each is told by the others; then what ranks share."""
    model, device = profile.model, profile.device
    table = Table(
        title=f"{model.architecture}, {model.hidden_size} wide, in {profile.compute_type} on {device.threads} threads of {device.type}, "
        f"keys and values of {profile.kv_bits} bits",
        title_justify="left",
    )
    for column in ("format", "phase", "kernels", "points", "error of a point left out"):
        table.add_column(column)
    for name, phase in sorted({(point.format, point.phase) for point in profile.points}):
        mine = [point for point in profile.points if (point.format, point.phase) == (name, phase)]
        error = profile.leave_one_out.get(f"{name} {phase}")
        kernels = ", ".join(dict.fromkeys(point.kernel for point in mine))
        table.add_row(name, phase, kernels, str(len(mine)), "" if error is None else f"{error:.1%}")
    for shared in profile.shared:
        for name, phase in sorted({(point.format, point.phase) for point in shared.points}):
            count = sum((point.format, point.phase) == (name, phase) for point in shared.points)
            table.add_row(name, phase, f"{shared.ranks} ranks", str(count), "")
    return table


def profiles_for(question: Question, file: Path | None, *, kept: bool) -> tuple[FittedLatency, ...]:
    """The named profile, else with `kept` those of this machine. Formats that they lack are told. Raises InvalidInputError."""
    request = question.request
    if file is not None:
        found: tuple[FittedLatency, ...] = (read_profile(file, request),)
    else:
        found = kept_profiles(request, _threads(question)) if kept else ()
    for source in found:
        _say_what_is_lacking(source, request)
    return found


def _say_what_is_lacking(source: FittedLatency, request: PlanRequest) -> None:
    device = source.profile.device
    lacking = [name for name in _names(request) if name not in source.profile.layers]
    if lacking:
        log.warning(
            "the profile for %s (threads: %d) has no %s: their seconds come from the next source; `strata profile -f` with this deployment adds them",
            device.type,
            device.threads,
            ", ".join(lacking),
        )


def _names(request: PlanRequest) -> list[FormatName]:
    """All formats that a plan may choose from, and those that its layers draft with, the widest first."""
    wanted = {name for names in request.formats.values() for name in names}
    wish = request.served_speculation
    wanted |= {ANY_PRECISION[wish.draft_bits] for name in wanted if has_draft(name, wish)}
    return [name for name in FORMAT_NAMES if name in wanted]


def _threads(question: Question) -> list[int]:
    """How many the CPU devices have, each number once."""
    devices = [device for node in question.cluster.nodes for device in node.devices if device.type == CPU]
    return sorted({max(1, device.threads) for device in devices})


def read_profile(file: Path, request: PlanRequest) -> FittedLatency:
    """Raises InvalidInputError for a file that is no profile of this release, or that answers nothing of this question."""
    try:
        source = FittedLatency(LatencyProfile.decode(read_text(file)))
    except ContractError as error:
        raise InvalidInputError(f"--profile {file}", [f"{error}; give a file that `strata profile` wrote"]) from error
    problem = _unfit(source, request)
    if problem:
        raise InvalidInputError(f"--profile {file}", [problem])
    return source


def kept_profiles(request: PlanRequest, threads: Iterable[int]) -> tuple[FittedLatency, ...]:
    """Of this machine's processor for the request's model, as kept by `strata profile`: those that there are."""
    folder = local_folder(request.model_uri)
    if not request.model_uri.startswith("file://") or not folder.is_dir():
        return ()
    found = []
    for count in threads:
        command = [*_Subject(folder, count, request.compute_type, request.kv_bits).command(), "--kept"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_KEPT_SECONDS, check=False)  # noqa: S603  our own module
        if ended.returncode == 0:
            source = FittedLatency(LatencyProfile.decode(Path(ended.stdout.strip()).read_bytes()))
            found += [source] if _unfit(source, request) is None else []
    return tuple(found)


def _unfit(source: FittedLatency, request: PlanRequest) -> str | None:
    """Why the profile answers nothing of the question; None: it answers something."""
    own, device = source.profile.model, source.profile.device
    if not any(source.knows_layer(layer) for layer in set(request.model.layers)):
        return (
            f"a profile of {own.architecture} layers, {own.hidden_size} wide with {own.heads} heads; this model's layers differ: "
            "run `strata profile` with this deployment"
        )
    rates = [
        Rates(each.profile, request.compute_type, request.kv_bits, each.name) for each in request.cluster.accelerators()
    ]
    if not any(source.knows_device(each) for each in rates):
        threads = sorted({each.profile.threads for each in rates})
        return (
            f"measured on {device.threads} threads of '{device.type}' in {source.profile.compute_type} with keys and values of "
            f"{source.profile.kv_bits} bits; no device of the cluster is that (threads {threads}, {request.compute_type}, {request.kv_bits} bits): run `strata profile` with this deployment and cluster"
        )
    return None


def _commands(options: ProfileOptions) -> list[list[str]]:
    """One per number of threads that the deployment's devices have."""
    if (options.deployment is None) == (options.model is None):
        raise InvalidInputError(
            "strata profile", ["give one of -f DEPLOYMENT and --model FOLDER: whose layers to measure"]
        )
    if options.kv_bits not in {None, *KV_BITS}:
        raise InvalidInputError("--kv-bits", [f"{options.kv_bits}: choose from {', '.join(map(str, KV_BITS))}"])
    if options.model is not None:
        subjects = [_Subject(options.model, options.threads or cores(), _COMPUTE_TYPE, options.kv_bits or max(KV_BITS))]
        formats = _checked(options.formats) or _stored(options.model)
    else:
        assert options.deployment is not None
        question = read_question(options.deployment, options.cluster, measure=False)
        request = question.request
        folder, kv_bits = _folder(request.model_uri), options.kv_bits or request.kv_bits
        threads = [options.threads] if options.threads else _threads(question)
        subjects = [_Subject(folder, count, request.compute_type, kv_bits) for count in threads or [cores()]]
        formats = _checked(options.formats) or _usable(request, options.device_type)
    if options.output is not None and len(subjects) > 1:
        raise InvalidInputError(
            "--output", [f"{len(subjects)} numbers of threads make as many profiles: give --threads N"]
        )
    asked = ["--formats", ",".join(formats)] if formats else []
    return [each.command() + asked + _flags(options) for each in subjects]


def _usable(request: PlanRequest, device_type: str) -> list[FormatName]:
    """What a plan may choose on devices of this type. A processor stores every format."""
    devices = [each for each in request.cluster.accelerators() if device_type in {each.name, each.profile.type}]
    runs = {name for each in devices for name in each.profile.decode_efficiency}
    return [name for name in _names(request) if device_type == CPU or not runs or name in runs]


def _stored(model: Path) -> list[FormatName]:
    """Of a checkpoint that is quantized already its own formats, and 16 bits; empty: of another, or of none, which the runtime refuses."""
    if not (model / "config.json").is_file():
        return []
    config = read_config(f"file://{model}")
    if CONFIG_FIELD not in config:
        return []
    stored = set(Model.from_config(config, for_serving=False).stored_formats)
    return [name for name in FORMAT_NAMES if name in stored or name == "dense"]


def _checked(names: Sequence[str]) -> list[FormatName]:
    unknown = sorted(set(names) - set(FORMAT_NAMES))
    if unknown:
        raise InvalidInputError("--formats", [f"{', '.join(unknown)}: choose from {', '.join(FORMAT_NAMES)}"])
    return [name for name in FORMAT_NAMES if name in names]


def _folder(uri: str) -> Path:
    if not uri.startswith("file://"):
        raise InvalidInputError(uri, ["only a local folder's config.json is read here: give --model FOLDER"])
    return local_folder(uri)


def _flags(options: ProfileOptions) -> list[str]:
    flags = ["--device", options.device, "--type", options.device_type]
    flags += ["--output", str(options.output)] if options.output else []
    flags += ["--company", str(options.company)] if options.company else []
    flags += ["--ranks", str(options.ranks)] if options.ranks > 1 else []
    return flags + ["--quick"] * options.quick + ["--fresh"] * options.fresh
