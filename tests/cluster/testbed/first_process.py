"""The first process of a world: gives it mounts of its own, then waits for orphans until it is killed.

Started by `World.create` inside fresh namespaces, as a script; knows nothing of what runs beside it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

# Where container tools keep state at fixed paths: what they write there goes into the world's directory instead.
COVERED = ("/var/lib", "/var/log")


def main(directory: Path) -> None:
    """Record this process as the machine sees it, make the world's mounts, reap."""
    # /proc is still the machine's, so it shows this process's id and start time outside.
    outside_pid = Path("/proc/self").readlink().name
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for path in COVERED:
        cover(path, directory / "covers" / path.strip("/").replace("/", "-"))
    resolver = directory / "resolv.conf"
    resolver.touch()
    # resolv.conf may be a link to a file below /run, which is empty now.
    run("mount", "--bind", str(resolver), str(Path("/etc/resolv.conf").resolve()))
    run("ip", "link", "set", "lo", "up")

    record = directory / ".first-process"
    record.write_text(f"{outside_pid} {started}\n")
    record.rename(directory / "first-process")
    reap()


def cover(path: str, writes: Path) -> None:
    """Show the machine's folder as it is, and keep what is written to it elsewhere."""
    upper, work = writes / "upper", writes / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True)
    run("mount", "-t", "overlay", "-o", f"lowerdir={path},upperdir={upper},workdir={work}", "overlay", path)


def run(*command: str) -> None:
    """One command that must succeed."""
    subprocess.run(command, check=True)


def reap() -> None:
    """Collect processes whose parents have ended, for ever."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            # No child now: sleep until one is handed over and ends.
            signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    main(Path(sys.argv[1]))
