"""What this machine is: its processor, its NVIDIA GPUs, the libraries that multiply on them, its memory.

Read from the kernel's files, without torch. Asked by whoever measures, profiles, or looks up what was measured. A leaf: imports none of ours.
"""

import os
from importlib import metadata
from pathlib import Path


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
