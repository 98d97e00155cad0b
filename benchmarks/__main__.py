"""Runs every benchmark in a process of its own and leaves its rows under build/bench. Called by `make bench`."""

import argparse
import subprocess
import sys
from pathlib import Path

# pipeline includes recovery and two of plan_clusters; planner the layouts; costs memory and sensitivity
BENCHMARKS = (
    "pipeline",
    "engine",  # installs its peers the first time
    "start",
    "serving",
    "scheduling",
    "ranks",
    "replicas",
    "hexgen_run",
    "self_drafts",
    "kernels",  # those of GPUs too
    "format_kernels",
    "loading",
    "precision_switch",
    "perplexity",
    "quality",
    "eight_bits",
    "planner",
    "repair",
    "steady",
    "elastic",
    "loss",
    "kills",
    "fleets",
    "costs",
    "truth",
    "local_fleets",
    "simulation",
    "silicon",
    "partition",
    "communication",
    "published",
    "operator",
    "hostile",
    "soak",
)
FOLDER = Path("build/bench")


def main() -> int:
    """0 when every benchmark ran to its end, whether or not it met its goals."""
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    failed = [name for name in BENCHMARKS if not _succeeds(name)]
    if failed:
        print(f"did not run to the end: {', '.join(failed)}")
    return 1 if failed else 0


def _succeeds(name: str) -> bool:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(FOLDER / f"{name}.json")]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
