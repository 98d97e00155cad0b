"""Ending a testbed, in order or by a crash, leaves the machine as it was. A second testbed is made inside the first for it."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.testbed import cgroups
from tests.cluster.testbed.processes import TestbedError, output_of, wait_until
from tests.cluster.testbed.world import World, mounts_below

pytestmark = pytest.mark.cluster

INNER = World("testbed-inner")


@pytest.fixture(autouse=True)
def inner() -> Iterator[None]:
    yield
    INNER.destroy()


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The testbed's command line. It ends with the block, its world with it."""
    command = [sys.executable, "-m", "tests.cluster.testbed", f"--name={INNER.name}", *arguments]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the same, once it has ended by itself."""
    with started(*arguments) as process:
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


def processes() -> list[str]:
    """The command lines of processes that work for the inner testbed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(INNER.directory) in line:
            found.append(line)
    return found


def machine() -> dict[str, object]:
    """What an ended testbed must not have changed here, besides files, processes and groups."""
    return {
        "mounts": sorted(mounts_below(Path("/"))),
        "processes": processes(),
        "files": INNER.directory.exists(),
        "groups": [str(root) for root in cgroups.hierarchies() if (root / f"strata-{INNER.name}").exists()],
        "links": sorted(name for _, name in socket.if_nameindex() if not name.startswith("veth")),
        "routes": stable("ip", "route"),
        "packet rules": stable("iptables-save"),
    }


def stable(*command: str) -> list[str]:
    """What a command lists, without what changes by itself: counters, comments, pods' links and whether a link has a carrier."""
    listing = subprocess.run(command, text=True, capture_output=True, check=True).stdout.replace("linkdown", "")
    kept = (line for line in listing.splitlines() if line[0] != "#" and "veth" not in line and not _of_a_service(line))
    return sorted(line.split("[")[0].strip() for line in kept)


def _of_a_service(rule: str) -> bool:
    """Of the outer testbed's services, whose endpoints come and go meanwhile. Every cluster has the two that are left, so the inner one would be seen."""
    chain = rule.startswith((":KUBE-SVC-", ":KUBE-SEP-", ":KUBE-EXT-"))
    return chain or re.search(r'--comment "(?!default/kubernetes|kube-system/)[\w-]+/', rule) is not None


def test_a_testbed_leaves_nothing_when_its_command_has_ended() -> None:
    before = machine()
    status, output = ended("run", "--nodes=1", "kubectl", "get", "nodes", "--no-headers")
    assert status == 0, output
    assert "node-a" in output
    assert machine() == before


def test_a_testbed_ends_with_its_killed_starter_and_the_next_one_sweeps() -> None:
    before = machine()
    with started("run", "--nodes=1", "sh", "-c", "echo inside; sleep 60") as run:
        assert run.stdout is not None
        while (line := run.stdout.readline()) != "inside\n":
            assert line, "the testbed ended before its command began"
        assert processes()
        run.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes(), "end of all processes of the killed testbed", 20)
    assert INNER.directory.exists()

    status, output = ended("down")
    assert status == 0, output
    assert machine() == before


def test_a_command_that_does_not_end_is_ended_and_named() -> None:
    with pytest.raises(TestbedError, match=r"sleep 60 did not end within 0\.2 s"):
        output_of(["sleep", "60"], seconds=0.2)


def test_a_second_testbed_of_the_same_name_is_refused() -> None:
    INNER.create(bound=True)
    status, output = ended("up")
    assert status == 1
    assert "is up already" in output
    assert INNER.first_process is not None


def test_a_recorded_id_that_another_process_has_now_is_not_ended() -> None:
    INNER.directory.mkdir()
    (INNER.directory / "first-process").write_text(f"{os.getpid()} 1\n")
    assert INNER.first_process is None
    INNER.destroy()
    assert not INNER.directory.exists()
