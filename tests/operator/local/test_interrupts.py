"""Ctrl-C as a terminal sends it: SIGINT to the whole process group of `strata up`, in each of its phases, and of other commands."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.laws import swept

PHASES = {
    "measuring": ("measuring the processor", "machine.MEASURE = SLOW"),
    "planning": ("planning", "up.make_plan = lambda *_, **_options: time.sleep(600)"),
    "loading": ("loading", "programs = replace(programs, launcher=SLOW)"),
}
# `strata up` on the example, one part of it without an end.
UP = """
import sys, time
from dataclasses import replace
from pathlib import Path
from strata_operator.commands import up
from strata_operator.local import machine
from strata_operator.local.deployment import Programs

SLOW = (sys.executable, "-c", "import time; time.sleep(600)")
programs = Programs()
root = Path(sys.argv[1])
{slow}
up.run(up.UpOptions(Path(sys.argv[2]), {cluster}, "127.0.0.1", 0, None, None, programs=programs))
"""
RATES = """
nodes:
- {name: a, devices: [{type: cpu, memoryBytes: 1Gi, profile: {layerOverheadSeconds: 0.001}}]}
- {name: b, devices: [{type: cpu, memoryBytes: 1Gi, profile: {layerOverheadSeconds: 0.001}}]}
"""  # rates are given, so that none are measured
ROOT = Path(__file__).parents[3]
DEPLOYMENT = f"""
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: quick}}
spec:
  model: {{uri: "file://{ROOT}/examples/models/strata-tiny", maxModelLen: 256}}
  workload: {{promptTokens: 32, outputTokens: 32}}
  precision: {{allowed: [16]}}
"""  # planned in a moment
# Another command, what it does in the end without an end.
TOOL = """
import hashlib, sys
from strata_operator import cli
from strata_operator.commands import {command}

def slow(_):  # in C, where Python hears no signal
    print("begun", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)

SLOW = (sys.executable, "-c", "import sys, time; print('begun', file=sys.stderr, flush=True); time.sleep(600)")
{command}.{slow}
sys.argv = ["strata", "{command}", {arguments}]
cli.main()
"""
TOOLS = {
    "quantize": ("ANY = SLOW", [str(ROOT / "examples/models/strata-tiny")]),
    "simulate": (
        "make_plan = slow",
        ["-f", str(ROOT / "examples/quickstart.yaml"), "--cluster", str(ROOT / "examples/clusters/two-unlike-cpus.yaml"),
         "--rate", "1", "--costs", "roofline"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("phase", swept(PHASES, ["planning"]))
def test_ctrl_c_ends_every_phase_with_a_line_and_nothing_left(phase: str, tmp_path: Path) -> None:
    doing, slow = PHASES[phase]
    (tmp_path / "cluster.yaml").write_text(RATES)
    deployment = tmp_path / "deployment.yaml"
    deployment.write_text(DEPLOYMENT)
    cluster = "None" if phase == "measuring" else f"Path({str(tmp_path / 'cluster.yaml')!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", UP.format(slow=slow, cluster=cluster), str(ROOT), str(deployment)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        held.enter_context(process)
        held.callback(process.kill)
        said = said_until(process, doing)
        os.killpg(process.pid, signal.SIGINT)
        said += process.communicate(timeout=60)[1]  # far less than what it was doing takes
        assert process.returncode == 128 + signal.SIGINT, said
        assert said.splitlines()[-1].startswith("strata: stopped while "), said
        assert doing in said.splitlines()[-1]
        assert ends(process.pid), said


@pytest.mark.slow
def test_ctrl_c_is_no_success_of_any_command(tmp_path: Path) -> None:
    """So that `strata quantize M && strata up` does not go on."""
    with contextlib.ExitStack() as held:
        started = []
        for command, (slow, arguments) in TOOLS.items():
            code = TOOL.format(command=command, slow=slow, arguments=", ".join(map(repr, arguments)))
            process = subprocess.Popen(
                [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            )  # fmt: skip
            started.append(held.enter_context(process))
            held.callback(process.kill)
        for process in started:
            said = said_until(process, "begun")
            os.killpg(process.pid, signal.SIGINT)
            said += process.communicate(timeout=60)[1]
            assert process.returncode == 128 + signal.SIGINT, said
            assert ends(process.pid), said


def said_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stderr
    said = ""
    while word not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def ends(group: int) -> bool:
    """Whether the last of its processes is gone soon: children get the signal too, and nobody tells when each has ended."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False
