"""A slot is killed in mid-stream under `strata up`: seconds to the client's next token, and whether the text is the same.

`python -m benchmarks.recovery [--json FILE]`. The killed slot alternates between the leader and the last stage.
In fp32 every text must be that of an undisturbed run; in bf16 the share of equal tokens is reported, because a replay by
prefill rounds differently from decode.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.rows import Row, run
from benchmarks.slots import free_address

MODEL = Path("examples/models/strata-tiny").resolve()
PROMPT = "def read(self, size=-1):"
TOKENS, KILL_AFTER = 160, 40
KILLS = 4
_PATIENCE_SECONDS = 60.0
_QUIET_SECONDS = 5.5  # between kills: a slot that dies again within 10 s of its start is started later on purpose


@dataclass(frozen=True)
class Stream:
    """One answer: its token strings and when each arrived (seconds of a steady clock)."""

    tokens: list[str]
    times: list[float]


class Deployment:
    """`strata up` over two CPU devices, in a process of its own."""

    def __init__(self, folder: Path, compute_type: str) -> None:
        self._logs = folder / "logs"
        self.port = free_address().control_port
        spec = {
            "apiVersion": "strata.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"uri": f"file://{MODEL}", "maxModelLen": 512},
                "workload": {"promptTokens": 32, "outputTokens": TOKENS, "concurrency": 2},
                "precision": {"allowed": [16]},
                "placement": {"minStages": 2},
                "runtime": {"computeType": compute_type},
            },
        }
        nodes = [
            {"name": name, "devices": [{"type": "cpu", "memoryBytes": 200_000_000, "threads": 1}]} for name in "ab"
        ]
        (folder / "deployment.yaml").write_text(json.dumps(spec))
        (folder / "cluster.yaml").write_text(json.dumps({"nodes": nodes}))
        command = [sys.executable, "-m", "strata_operator.cli", "up", "-f", str(folder / "deployment.yaml")]
        command += ["--cluster", str(folder / "cluster.yaml"), "--port", str(self.port), "--logs", str(self._logs)]
        self._output = (folder / "up.log").open("w+")
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        self._await_ready(folder / "up.log")

    def _await_ready(self, log: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while "ready: " not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`strata up` did not become ready:\n{log.read_text()}")
            time.sleep(0.05)

    def kill_slot(self, place: int) -> None:
        """SIGKILL the slot of the first or last stage, as its newest log line names its process."""
        logs = sorted(path for path in self._logs.glob("*.log") if path.stem.startswith("bench-"))
        pids = re.findall(r"is process (\d+) and waits", logs[place].read_text())
        os.kill(int(pids[-1]), signal.SIGKILL)

    def stream(self) -> Iterator[str]:
        body = {
            "model": "bench",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "logprobs": 0,
        }
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=_PATIENCE_SECONDS) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield from _tokens(json.loads(line[6:]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._output.close()


def _tokens(chunk: dict[str, list[dict[str, dict[str, list[str]] | None]]]) -> list[str]:
    logprobs = chunk["choices"][0].get("logprobs") if chunk["choices"] else None
    return logprobs["tokens"] if logprobs else []


def record(deployment: Deployment, kill: int | None = None) -> Stream:
    """One answer; slot number `kill` is killed after some tokens."""
    tokens: list[str] = []
    times: list[float] = []
    for token in deployment.stream():
        tokens.append(token)
        times.append(time.monotonic())
        if len(tokens) == KILL_AFTER and kill is not None:
            deployment.kill_slot(kill)
    return Stream(tokens, times)


@contextlib.contextmanager
def deployed(compute_type: str) -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), compute_type)
        try:
            yield deployment
        finally:
            deployment.close()


def measure_kills(compute_type: str, kills: int) -> tuple[list[float], list[float]]:
    """Per kill: the longest pause of the stream in seconds, and the share of tokens equal to an undisturbed run's."""
    with deployed(compute_type) as deployment:
        undisturbed = record(deployment)
        streams = []
        for number in range(kills):
            time.sleep(_QUIET_SECONDS)
            streams.append(record(deployment, kill=-(number % 2)))
    pauses = [max(later - earlier for earlier, later in zip(s.times, s.times[1:], strict=False)) for s in streams]
    shares = [_equal_share(undisturbed.tokens, stream.tokens) for stream in streams]
    return pauses, shares


def _equal_share(expected: list[str], got: list[str]) -> float:
    equal = sum(one == other for one, other in zip(expected, got, strict=False))
    return equal / max(len(expected), len(got))


def measure(kills: int = KILLS) -> list[Row]:
    pauses, exact = measure_kills("float32", kills)
    _, rounded = measure_kills("bfloat16", kills)
    print(f"pauses of the stream in seconds (leader, last stage, ...): {', '.join(f'{pause:.2f}' for pause in pauses)}")
    return [
        Row(name="recovery_seconds", value=statistics.median(pauses), unit=f"s, median of {kills} kills"),
        Row(
            name="recovery_equal_fp32",
            value=statistics.mean(exact),
            unit="share of equal tokens",
            goal=1.0,
            ratio=statistics.mean(exact),
        ),
        Row(name="recovery_equal_bf16", value=statistics.mean(rounded), unit="share of equal tokens"),
    ]


if __name__ == "__main__":
    run("recovery", measure)
