"""Measures the device this process runs on: `python -m strata_runtime.measuring.measure --threads N [--json]`.

Called by `strata up` and by whoever wants real rates in place of the catalogue's: it prints a contract DeviceProfile. A result is kept in
`${XDG_CACHE_HOME:-~/.cache}/strata` and printed at once the next time; `--fresh` measures again. Beside it is kept which kernel of each format is
the fastest for how many tokens (`kernel_timing`). Knows nothing of models or plans.

`strata_runtime.measuring.timing` takes the times; `profile_of` turns them into rates, the other way round than the planner's roofline: a linear of
`format` at one token took bytes / (bandwidth * decode efficiency), at PREFILL_TOKENS operations / (flops * prefill efficiency).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_planner.contract.values import ContractError, from_builtins, to_json
from strata_runtime.errors import InputError
from strata_runtime.kernels.native import build

VERSION = 4  # of the measurement: raised when its results change meaning
PREFILL_TOKENS = 256
KERNELS_TIMEOUT_SECONDS = 900.0  # of a GPU, compilers included


@dataclass(frozen=True)
class LinearSeconds:
    """One linear: at one token with weights beyond the cache, and at PREFILL_TOKENS tokens."""

    decode: float
    prefill: float


@dataclass(frozen=True)
class Timings:
    """What was timed. `features`: outputs and inputs of the linears."""

    features: int
    bandwidth_bytes_per_second: float
    flops_per_second: float
    float32_flops_per_second: float
    linears: dict[FormatName, LinearSeconds]
    layer_overhead_seconds: float
    step_overhead_seconds: float


@dataclass(frozen=True)
class Subject:
    """The device that was timed, and the arithmetic on it."""

    type: str
    memory_bytes: int
    threads: int
    compute_type: ComputeType
    compute_capability: str = ""
    packed_rows: Mapping[FormatName, int] = field(default_factory=dict)


def best_of(first: Timings, second: Timings) -> Timings:
    """The better of two measurements, figure by figure: other programs of the machine only ever add time."""
    return Timings(
        features=first.features,
        bandwidth_bytes_per_second=max(first.bandwidth_bytes_per_second, second.bandwidth_bytes_per_second),
        flops_per_second=max(first.flops_per_second, second.flops_per_second),
        float32_flops_per_second=max(first.float32_flops_per_second, second.float32_flops_per_second),
        linears={
            name: LinearSeconds(
                min(one.decode, second.linears[name].decode), min(one.prefill, second.linears[name].prefill)
            )
            for name, one in first.linears.items()
        },
        layer_overhead_seconds=min(first.layer_overhead_seconds, second.layer_overhead_seconds),
        step_overhead_seconds=min(first.step_overhead_seconds, second.step_overhead_seconds),
    )


def profile_of(subject: Subject, timings: Timings) -> DeviceProfile:
    """Times to rates. Memory is at least as fast as the fastest linear read it, so no decode efficiency is above 1."""
    size, item = timings.features, COMPUTE_TYPE_BYTES[subject.compute_type]
    operations = 2 * PREFILL_TOKENS * size * size
    flops = timings.float32_flops_per_second if subject.compute_type == "float32" else timings.flops_per_second
    read = {
        name: (stored_bytes(name, size, size, subject.compute_type) + 2 * size * item) / seconds.decode
        for name, seconds in timings.linears.items()
    }
    bandwidth = max(timings.bandwidth_bytes_per_second, *read.values())
    return DeviceProfile(
        type=subject.type,
        memory_bytes=subject.memory_bytes,
        bandwidth_bytes_per_second=bandwidth,
        flops_per_second=timings.flops_per_second,
        float32_flops_per_second=timings.float32_flops_per_second,
        decode_efficiency={name: rate / bandwidth for name, rate in read.items()},
        prefill_efficiency={name: operations / (flops * seconds.prefill) for name, seconds in timings.linears.items()},
        layer_overhead_seconds=timings.layer_overhead_seconds,
        step_overhead_seconds=timings.step_overhead_seconds,
        source="measured",
        compute_capability=subject.compute_capability,
        threads=subject.threads,
        packed_rows=dict(subject.packed_rows),
    )


def processor_name() -> str:
    """What tells one CPU from another: its model and what it can do."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)  # the first processor wins
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{found.get('model name', os.uname().machine)} {found.get('flags', found.get('Features', ''))}"


def gpu_names(driver: Path = Path("/proc/driver/nvidia")) -> str:
    """What tells one machine's NVIDIA GPUs from another's, without importing torch: their models, as the driver lists them."""
    listed = (file.read_text(encoding="utf-8").splitlines() for file in sorted(driver.glob("gpus/*/information")))
    return ", ".join(line.split(":", 1)[1].strip() for lines in listed for line in lines if line.startswith("Model:"))


def gpu_libraries() -> dict[str, str]:
    """The libraries that kernels of GPUs come from, by version; empty where one is not installed."""
    versions = {}
    for name in ("triton", "humming-kernels"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or less where a control group above this process (version 2, or the root of version 1) says so."""
    meminfo = (root / "proc/meminfo").read_text(encoding="utf-8").split()
    limits = [int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024]
    groups = root / "sys/fs/cgroup"
    files = [groups / "memory/memory.limit_in_bytes"]
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        own = groups / line.split(":", 2)[2].lstrip("/")
        files += [folder / "memory.max" for folder in (own, *own.parents) if folder.is_relative_to(groups)]
    limits += [int(text) for file in files if file.is_file() and (text := file.read_text().strip()).isdigit()]
    return min(limits)


@dataclass(frozen=True)
class Store:
    """One kept profile. `key`: everything that would make another measurement differ."""

    file: Path
    key: dict[str, Any]

    def load(self) -> DeviceProfile | None:
        """The kept profile, or None if there is none, it is of another version, or it does not read."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            return from_builtins(kept["profile"], DeviceProfile) if kept["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError, ContractError):
            return None

    def save(self, profile: DeviceProfile) -> None:
        """Replaces the file in one move, so that two processes that measure at once leave a whole one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.file.with_suffix(f".{os.getpid()}")
        scratch.write_text(
            json.dumps({"key": self.key, "profile": json.loads(to_json(profile))}, indent=1), encoding="utf-8"
        )
        scratch.replace(self.file)


def store_of(device: str, threads: int, compute_type: ComputeType) -> Store:
    """Where the profile of this machine's device is kept."""
    name = processor_name()
    key: dict[str, Any] = {
        "version": VERSION,
        "torch": metadata.version("torch"),
        "processor": name,
        "device": device,
        "threads": threads,
        "computeType": compute_type,
    }
    key |= {"gpus": gpu_names()} | gpu_libraries() if device == "cuda" else {"library": build.digest()}
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(f"{name} {device} {compute_type}".encode()).hexdigest()[:12]
    return Store(base / "strata" / f"profile-{digest}-{threads}.json", key)


def measure(device: str, name: str, threads: int, compute_type: ComputeType) -> DeviceProfile:
    """Time this machine's device now. Sets the process' number of threads. Raises InputError for a device that is not there."""
    import torch  # noqa: PLC0415 -- seconds to import, and a kept profile needs none of it

    from strata_runtime.formats import COMPUTE_DTYPES  # noqa: PLC0415
    from strata_runtime.formats.kernels import packed_rows  # noqa: PLC0415
    from strata_runtime.measuring import timing  # noqa: PLC0415

    torch.set_num_threads(threads)
    memory, capability = memory_limit_bytes(), ""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "--device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA build of torch"
            )
        properties = torch.cuda.get_device_properties(0)
        memory, capability = properties.total_memory, f"{properties.major}.{properties.minor}"
        _keep_kernels_of_gpu(compute_type)
    else:
        _keep_kernels(compute_type)
    timings = timing.take(torch.device(device), compute_type, lambda what: _say(f"measuring: {what}"))
    count = threads if device == "cpu" else 0
    packed = packed_rows(COMPUTE_DTYPES[compute_type], threads) if device == "cpu" else {}
    return profile_of(Subject(name, memory, count, compute_type, capability, packed), timings)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    store = store_of(options.device, options.threads, options.compute_type)
    profile = None if options.fresh else store.load()
    if profile is None:
        try:
            profile = measure(options.device, options.type, options.threads, options.compute_type)
        except InputError as error:
            _say(f"error: {error}")
            return 2
        _keep(store, profile)
    if options.device == "cpu":  # a control group's limit may have moved since
        profile = msgspec.structs.replace(profile, memory_bytes=memory_limit_bytes())
    profile = msgspec.structs.replace(profile, type=options.type)
    sys.stdout.write(to_json(profile).decode() + "\n" if options.json else table(profile))
    return 0


def _keep(store: Store, profile: DeviceProfile) -> None:
    try:
        store.save(profile)
    except OSError as error:
        _say(f"not kept, so the next start measures again: {error}")
    else:
        _say(f"kept in {store.file}")


def _keep_kernels(compute_type: ComputeType) -> None:
    """Time which kernel is the fastest for how many tokens: slots of this machine choose by it, and so does the measurement that follows."""
    from strata_runtime.measuring import kernel_timing  # noqa: PLC0415 -- as in `measure`

    kernel_timing.keep("cpu", compute_type, None, _say)


def _keep_kernels_of_gpu(compute_type: ComputeType) -> None:
    """The same in a process of its own: a kernel that faults or hangs takes every later call of its process with it.

    Then once more without humming-kernels, the only ones that were not written for this runtime.
    """
    command = [
        sys.executable,
        "-m",
        "strata_runtime.measuring.kernel_timing",
        "--device",
        "cuda",
        "--compute-type",
        compute_type,
    ]
    for options in ([], ["--without-humming"]):
        try:
            subprocess.run([*command, *options], check=True, timeout=KERNELS_TIMEOUT_SECONDS)  # noqa: S603 -- our own module
        except (OSError, subprocess.SubprocessError) as error:
            _say(
                f"timing kernels failed, {'so they are chosen by their own limits' if options else 'trying again'}: {error}"
            )
        else:
            return


def table(profile: DeviceProfile) -> str:
    """The profile for people."""
    lines = [
        f"{profile.type}, {profile.threads} threads, {profile.memory_bytes / 2**30:.1f} GiB",
        f"memory      {profile.bandwidth_bytes_per_second / 1e9:8.1f} GB/s",
        f"16 bits     {profile.flops_per_second / 1e9:8.0f} GFLOP/s",
        f"float32     {profile.float32_flops_per_second / 1e9:8.0f} GFLOP/s",
        f"layer       {profile.layer_overhead_seconds * 1e6:8.0f} us",
        f"step        {profile.step_overhead_seconds * 1e6:8.0f} us",
        "share of these that a linear reaches   1 token   many tokens",
    ]
    lines += [
        f"  {name:36} {profile.decode_efficiency[name]:7.2f} {profile.prefill_efficiency[name]:13.2f}"
        for name in profile.decode_efficiency
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.measuring.measure", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--threads", type=positive, default=1, help="threads that a stage will compute with")
    parser.add_argument("--type", default="cpu", help="the device type that the profile is for")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="measure again even if a profile is kept")
    return parser


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads; use 1 or more")
    return int(text)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
