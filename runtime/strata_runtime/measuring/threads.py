"""What more threads give on this machine's processors: `python -m strata_runtime.measuring.threads [1 2 4 ...] [--fresh]`.

Each number is measured as `measure` does, in a process of its own, and kept like it. Without numbers: one thread, twice as many each, and all that this
process may use. For whoever decides how many threads a device of a cluster file has.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.processors import cores
from strata_planner.contract.values import ContractError, from_json
from strata_runtime.command_line import positive
from strata_runtime.errors import RuntimeFaultError

MEASURE = (sys.executable, "-m", "strata_runtime.measuring.measure")


def usual_counts(processors: int) -> list[int]:
    """1, 2, 4, ... and all of them."""
    return sorted({min(1 << power, processors) for power in range(processors.bit_length() + 1)})


def measured(threads: int, *, fresh: bool = False, command: Sequence[str] = MEASURE) -> DeviceProfile:
    """Raises RuntimeFaultError where it cannot be measured."""
    whole = [*command, "--threads", str(threads), "--json", *(["--fresh"] if fresh else [])]
    try:
        printed = subprocess.run(whole, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603  our own module
        return from_json(printed, DeviceProfile)
    except (subprocess.CalledProcessError, ContractError) as error:
        raise RuntimeFaultError(f"measuring {threads} threads failed: {error}") from error


def table(profiles: Mapping[int, DeviceProfile]) -> str:
    """By threads: rates, and in brackets how many times those of the fewest threads. Of 16-bit weights: bytes of one token's products, operations of many tokens'."""
    first = _rates(profiles[min(profiles)])
    lines = ["threads  " + "  ".join(f"{name:>20}" for name in first)]
    for threads, profile in sorted(profiles.items()):
        cells = [f"{rate:.1f} ({rate / first[name]:.2f})" for name, rate in _rates(profile).items()]
        lines.append(f"{threads:>7}  " + "  ".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines) + "\n"


def _rates(profile: DeviceProfile) -> dict[str, float]:
    return {
        "reading, GB/s": profile.bandwidth_bytes_per_second / 1e9,
        "one token, GB/s": profile.bandwidth_bytes_per_second * profile.decode_efficiency["dense"] / 1e9,
        "many tokens, GFLOP/s": profile.flops_per_second * profile.prefill_efficiency["dense"] / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.measuring.threads", description="What more threads give on this machine."
    )
    parser.add_argument("threads", nargs="*", type=positive, help="numbers of threads; by default 1, 2, 4, ... and all")
    parser.add_argument("--json", action="store_true", help="print the profiles as JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="measure again even what is kept")
    known = parser.parse_args(arguments)
    most = cores()
    if too_many := [each for each in known.threads if each > most]:
        parser.error(f"threads {too_many[0]}: this process may use {most} processors; ask for at most so many")
    try:
        profiles = {each: measured(each, fresh=known.fresh) for each in known.threads or usual_counts(most)}
    except RuntimeFaultError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if known.json:
        sys.stdout.write(msgspec.json.encode(list(profiles.values())).decode() + "\n")
    else:
        sys.stdout.write(table(profiles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
