"""A deployment under `strata up` for benchmarks that break it: started in a process of its own, looked at from outside.

What is known of it is what a user knows: its HTTP port, the record that commands of the same user read, its processes and the
ports that they listen at. Nothing here reaches into the supervisor.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import known_up
from benchmarks.slots import free_address
from strata_operator.local.record import RunningDeployment, running_deployment
from strata_planner.contract.keys import new_secret

NAME = "bench"
_PATIENCE_SECONDS = 150.0  # a busy machine needs most of a minute to start four processes
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Wishes:
    """What is deployed: so many stages of `model` on CPU devices of one thread each."""

    model: Path
    max_model_len: int = 512
    prompt_tokens: int = 32
    output_tokens: int = 160
    concurrency: int = 2
    compute_type: str = "float32"
    device_bytes: int = 200_000_000
    stages: int = 2
    open_files: int | None = None  # the soft limit of each process; None: this one's
    drafts: int = 0  # tokens that are guessed from the text itself

    def deployment(self) -> Mapping[str, object]:
        return {
            "apiVersion": "strata.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": NAME},
            "spec": {
                "model": {"uri": f"file://{self.model}", "maxModelLen": self.max_model_len},
                "workload": {
                    "promptTokens": self.prompt_tokens,
                    "outputTokens": self.output_tokens,
                    "concurrency": self.concurrency,
                },
                "precision": {"allowed": [16]},
                "placement": {"minStages": self.stages},
                "runtime": {"computeType": self.compute_type, **self._speculation()},
            },
        }

    def _speculation(self) -> Mapping[str, object]:
        return {"speculation": {"mode": "ngram", "tokens": self.drafts}} if self.drafts else {}

    def cluster(self) -> Mapping[str, object]:
        device = {"type": "cpu", "memoryBytes": self.device_bytes, "threads": 1}
        return {"nodes": [{"name": name, "devices": [device]} for name in "abcdefgh"[: self.stages]]}


class Deployment:
    """`strata up`, ready when this returns. Its record lies in `folder`, apart from other deployments of this user."""

    def __init__(self, folder: Path, wishes: Wishes) -> None:
        self.port = free_address().control_port
        self.logs = folder / "logs"
        self.output = folder / "up.log"
        (folder / "deployment.yaml").write_text(json.dumps(wishes.deployment()))
        (folder / "cluster.yaml").write_text(json.dumps(wishes.cluster()))
        os.environ["XDG_RUNTIME_DIR"] = str(folder)  # of this process too: `record` looks there
        self.control_secret = new_secret()
        command = [
            sys.executable,
            "-m",
            "benchmarks.known_up",
            "up",
            "--verbose",
            "-f",
            str(folder / "deployment.yaml"),
        ]
        command += ["--cluster", str(folder / "cluster.yaml"), "--port", str(self.port), "--logs", str(self.logs)]
        self._file = self.output.open("w")
        environment = {**os.environ, known_up.VARIABLE: self.control_secret}
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT, env=environment)
        if wishes.open_files:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(
                self.process.pid, resource.RLIMIT_NOFILE, (wishes.open_files, most)
            )  # it starts the others
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def record(self) -> RunningDeployment:
        return running_deployment(NAME)

    def await_processes(self) -> dict[str, psutil.Process]:
        """Name -> process of the slots, the gateway, their launcher and the supervisor, once all are there."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (found := self.processes()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"not all processes came back in {_PATIENCE_SECONDS:g} s:\n{self.output.read_text()}"
                )
            time.sleep(_LOOK_SECONDS)
        return found

    def kill_slot(self, place: int) -> None:
        """SIGKILL the slot of the first or last stage."""
        name = self.record.plan.replicas[0].stages[place].slot
        self.await_processes()[name].kill()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._file.close()

    def processes(self) -> dict[str, psutil.Process]:
        """All, or none while one is missing."""
        wanted = {port: slot for slot, port in self.record.control_ports.items()} | {self.port: "gateway"}
        found = {"supervisor": psutil.Process(self.process.pid)}
        for child in found["supervisor"].children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for port in listening(child):
                    if port in wanted:
                        found[wanted[port]] = child
        with contextlib.suppress(psutil.Error):
            if len(found) == len(wanted) + 1 and (launcher := found["gateway"].parent()):
                return {**found, "launcher": launcher}
        return {}

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while "ready: " not in self.output.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`strata up` did not become ready:\n{self.output.read_text()}")
            time.sleep(_LOOK_SECONDS)


def listening(process: psutil.Process) -> dict[int, str]:
    """Port -> address of a process's listeners. Raises psutil.Error for one that is gone."""
    connections = process.net_connections("tcp")
    return {each.laddr.port: each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


@contextlib.contextmanager
def deployed(folder: Path, wishes: Wishes) -> Iterator[Deployment]:
    """A deployment that ends with this process, when that is told to end too. Called in the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deployment = Deployment(folder, wishes)
    try:
        yield deployment
    finally:
        deployment.close()
