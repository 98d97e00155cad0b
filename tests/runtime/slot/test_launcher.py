"""The launcher as its supervisor meets it: a real process, forked children, no survivors."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = """
import os, sys, time
def main(arguments):
    print("child says", arguments, "numpy" in sys.modules, os.environ.get("STRATA_TEST"))
    if arguments == ["fail"]:
        raise ValueError("as asked")
    if arguments == ["wait"]:
        time.sleep(60)
    return 0
"""


class LauncherProcess:
    def __init__(self, folder: Path) -> None:
        (folder / "launched_child.py").write_text(CHILD)
        environment = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-m", "strata_runtime.slot.launcher", "numpy"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.folder = folder

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard

    def start(self, *arguments: str) -> int:
        log = str(self.folder / "child.log")
        environment = {"STRATA_TEST": "told"}
        message = {
            "id": "a",
            "module": "launched_child",
            "arguments": arguments,
            "log": log,
            "environment": environment,
        }
        self.say(message)
        heard = self.hear()
        assert heard["id"] == "a"
        return int(heard["pid"])

    def log(self) -> str:
        return (self.folder / "child.log").read_text()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherProcess]:
    launcher = LauncherProcess(tmp_path_factory.mktemp("launcher"))
    assert launcher.hear() == {"ready": True}
    yield launcher
    if launcher.process.poll() is None:
        launcher.process.communicate(timeout=30)


def test_a_child_runs_its_module_and_its_exit_is_told(launcher: LauncherProcess) -> None:
    pid = launcher.start("hello")
    assert launcher.hear() == {"pid": pid, "exit": 0}
    assert "child says ['hello'] True told" in launcher.log()


def test_a_failing_child_leaves_its_traceback_in_its_log(launcher: LauncherProcess) -> None:
    pid = launcher.start("fail")
    assert launcher.hear() == {"pid": pid, "exit": 1}
    assert "ValueError: as asked" in launcher.log()


def test_a_killed_child_is_told_with_its_signal(launcher: LauncherProcess) -> None:
    pid = launcher.start("wait")
    os.kill(pid, signal.SIGKILL)
    assert launcher.hear() == {"pid": pid, "exit": -signal.SIGKILL}


def test_the_end_of_stdin_ends_every_child(launcher: LauncherProcess) -> None:
    """The last: it is the launcher's end, too."""
    pid = launcher.start("wait")
    output, _ = launcher.process.communicate(timeout=30)
    assert json.loads(output) == {"pid": pid, "exit": -signal.SIGTERM}
    assert launcher.process.returncode == 0
