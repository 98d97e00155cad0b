"""Measures the device this process runs on: `python -m strata_runtime.measuring.measure --threads N [--json]`.

Called by `strata up` and by whoever wants real rates in place of the catalogue's: it prints a contract DeviceProfile. A result is kept in
`${XDG_CACHE_HOME:-~/.cache}/strata` and printed at once the next time; `--fresh` measures again. Beside it is kept which kernel of each format is
the fastest for how many tokens (`kernel_timing`). Knows nothing of models or plans.

`strata_runtime.measuring.timing` takes the times, `strata_runtime.measuring.rates` turns them into rates.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.processors import ANYWHERE, bind, cores, memories
from strata_planner.contract.store import cache_folder, write_whole
from strata_planner.contract.values import ContractError, from_builtins, to_json
from strata_runtime.command_line import positive
from strata_runtime.device import gpu_libraries, gpu_names, memory_limit_bytes, processor_name
from strata_runtime.errors import InputError
from strata_runtime.kernels.native import build
from strata_runtime.measuring.rates import Subject, profile_of

VERSION = 14  # of the measurement: raised when its results change meaning
# Other slots of this machine compute meanwhile and share its memory: so many processes do while one is measured. What small layers take is
# measured beside small ones, what reading large weights takes beside large ones, which leave less of the memory to others.
MOST_BESIDE = 3
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 13}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 13}
LARGE_BYTES = 1 << 30  # that a process of these takes, about
KERNELS_TIMEOUT_SECONDS = 900.0  # of a GPU, compilers included


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
        """In one move: two processes that measure at once leave a whole one."""
        kept = {"key": self.key, "profile": json.loads(to_json(profile))}
        write_whole(self.file, json.dumps(kept, indent=1).encode())


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
    if device == "cpu" and len(beside := memories()) > 1:
        key["memories"] = [len(each) for each in beside]
    key |= {"gpus": gpu_names()} | gpu_libraries() if device == "cuda" else {"library": build.digest()}
    digest = hashlib.sha256(f"{name} {device} {compute_type}".encode()).hexdigest()[:12]
    return Store(cache_folder() / f"profile-{digest}-{threads}.json", key)


def measure(device: str, name: str, threads: int, compute_type: ComputeType) -> DeviceProfile:
    """Time this machine's device now. Sets the process' number of threads. Raises InputError for a device that is not there."""
    import torch  # noqa: PLC0415 -- seconds to import, and a kept profile needs none of it

    from strata_runtime.formats import COMPUTE_DTYPES  # noqa: PLC0415
    from strata_runtime.formats.kernels import packed_rows  # noqa: PLC0415
    from strata_runtime.measuring import overheads, served, timing  # noqa: PLC0415
    from strata_runtime.measuring.profiling.company import in_company  # noqa: PLC0415
    from strata_runtime.model.padding import pads  # noqa: PLC0415

    nodes = memories()
    own = nodes[0] if device == "cpu" and len(nodes) > 1 and threads <= len(nodes[0]) else ANYWHERE
    bind(own)  # as a slot is; so is what computes in company
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
    beside = max(0, min(MOST_BESIDE, cores() // threads - 1)) if device == "cpu" else 0
    _say("measuring: layers and steps")
    with in_company(beside, overheads.FIELDS | SMALL, "dense", compute_type):
        taken = overheads.take(torch.device(device), compute_type)
        of_gateway = served.token_seconds(compute_type) if device == "cpu" else 0.0
    larger = LARGE if memory > 2 * max(1, beside) * LARGE_BYTES else SMALL
    with in_company(beside, overheads.FIELDS | larger, "dense", compute_type):
        timings = timing.take(torch.device(device), compute_type, taken, lambda what: _say(f"measuring: {what}"))
    together = timing.read_together(cores()) if beside else 0.0  # of one device alone its own rates say it all
    together *= len(nodes) if own else 1  # whoever computes beside another memory reads from that one
    count = threads if device == "cpu" else 0
    dtype = COMPUTE_DTYPES[compute_type]
    packed = packed_rows(dtype, threads) if device == "cpu" else {}
    profile = profile_of(Subject(name, memory, count, compute_type, capability, packed, pads(dtype)), timings)
    return msgspec.structs.replace(profile, gateway_token_seconds=of_gateway, node_bandwidth_bytes_per_second=together)


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
        f"memory      {profile.bandwidth_bytes_per_second / 1e9:8.1f} GB/s" + _shared(profile),
        f"16 bits     {profile.flops_per_second / 1e9:8.0f} GFLOP/s",
        f"float32     {profile.float32_flops_per_second / 1e9:8.0f} GFLOP/s",
        f"layer       {profile.layer_overhead_seconds * 1e6:8.0f} us",
        f"step        {profile.step_overhead_seconds * 1e6:8.0f} us; of two alike the later ends {profile.step_variation:.1%} later than the mean",
        f"sequence    {profile.sequence_layer_seconds * 1e6:8.1f} us in a layer, {profile.sequence_step_seconds * 1e6:.1f} us in a step",
        f"gateway     {profile.gateway_token_seconds * 1e6:8.0f} us a token",
        f"attention   {profile.attention_bytes_per_second / 1e9:8.1f} GB/s of keys and values",
        f"prompts     {profile.attention_flops_per_second / 1e9:8.0f} GFLOP/s of attention",
        f"rows        {profile.activation_bytes_per_second / 1e9:8.1f} GB/s of prompts' activations, {profile.chunk_layer_seconds * 1e6:.0f} us of a prompt in a layer",
        "share of these that a linear reaches   1 token   many tokens",
    ]
    lines += [
        f"  {name:36} {profile.decode_efficiency[name]:7.2f} {profile.prefill_efficiency[name]:13.2f}"
        for name in profile.decode_efficiency
    ]
    return "\n".join(lines) + "\n"


def _shared(profile: DeviceProfile) -> str:
    whole = profile.node_bandwidth_bytes_per_second
    return f", {whole / 1e9:.1f} of all devices of the machine that read at once" if whole else ""


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


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
