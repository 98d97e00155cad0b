"""Control groups of the testbed: one group per node, so that its processes can be limited, counted and ended together.

Serves version 1 (a hierarchy per controller) and version 2 (one hierarchy). Knows nothing of Kubernetes.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000


def unified() -> bool:
    """Whether the machine mounts version 2 alone."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The roots under which a group has a folder: one in version 2, one per controller in version 1."""
    if unified():
        return [ROOT]
    return [path for path in sorted(ROOT.iterdir()) if not path.is_symlink() and (path / "cgroup.procs").exists()]


def create(group: str) -> None:
    """Make a group and its parents everywhere, with controllers and processors handed down."""
    parents = [*reversed(Path(group).parents), Path(group)][1:]
    for folder in (root / part for root in hierarchies() for part in parents):
        if unified():
            _hand_down_controllers(folder.parent)
        folder.mkdir(exist_ok=True)
        # Version 1 gives a new cpuset no processors and no memory, and no process can join it.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (folder / file).exists() and not unified() and not (folder / file).read_text().strip():
                (folder / file).write_text((folder.parent / file).read_text())


def _hand_down_controllers(parent: Path) -> None:
    for controller in ("cpu", "cpuset", "memory", "pids", "io"):
        with contextlib.suppress(OSError):  # not every kernel has every controller
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def limit_cpus(group: str, cpus: float) -> None:
    """Let the group's processes use so many processors' time together, in every period of 100 ms."""
    quota = int(cpus * PERIOD_MICROSECONDS)
    if unified():
        (ROOT / group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
    else:
        (ROOT / "cpu" / group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (ROOT / "cpu" / group / "cpu.cfs_quota_us").write_text(str(quota))


def join(group: str, pid: int) -> None:
    """Count a process, and what it starts from now on, as the group's; limits of processor and memory stay the parent's."""
    root = ROOT if unified() else ROOT / "pids"
    (root / group / "cgroup.procs").write_text(str(pid))


def processes(group: str) -> set[int]:
    """Ids, as the caller's namespace numbers them, of all processes in the group and below."""
    root = ROOT if unified() else ROOT / "pids"
    found: set[int] = set()
    for folder, _, _ in os.walk(root / group):
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split())
    return found - {0}


def kill(group: str, timeout_seconds: float = 10) -> None:
    """End all processes of the group at once; `TimeoutError` where some do not end."""
    deadline = time.monotonic() + timeout_seconds
    while remaining := processes(group):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(remaining)} of {group} live {timeout_seconds} s after SIGKILL")
        time.sleep(0.02)


def remove(group: str, timeout_seconds: float = 10) -> None:
    """Remove the group and all below it, everywhere. Its processes must have been ended; nothing happens where there is none."""
    deadline = time.monotonic() + timeout_seconds
    while present := [root / group for root in hierarchies() if (root / group).exists()]:
        for folder in (Path(name) for top in present for name, _, _ in os.walk(top, topdown=False)):
            with contextlib.suppress(OSError):  # the kernel lets go of a killed process's group a moment later
                folder.rmdir()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{present[0]} is still in use {timeout_seconds} s after its processes ended")
        time.sleep(0.02)
