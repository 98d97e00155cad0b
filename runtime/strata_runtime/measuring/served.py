"""What a token takes the gateway of a machine: processor seconds of a gateway's own process in front of a pipeline that computes nothing.

Called by `measure`. Where slots fill all processors of a machine, its gateway works on theirs. Requests are of usual size: what a request takes by
itself counts with its tokens.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import zmq
from tokenizers import Tokenizer, models, pre_tokenizers

from strata_planner.contract.control import LARGEST_CONTROL_BYTES, GetStatus, SetRoute, encode
from strata_planner.contract.formats import ComputeType
from strata_runtime.errors import InputError
from strata_runtime.measuring.profiling.handling import IdlePipeline, idle_pipeline
from strata_runtime.wire.transport import Keys, connect

GATEWAY = (sys.executable, "-m", "strata_runtime.gateway")
CLIENTS, REQUESTS_EACH, PROMPT, ANSWER = 8, 2, 64, 64
WIDTH, MOST_STEP_TOKENS = 384, 512
START_SECONDS, ANSWER_SECONDS = 30.0, 60.0
_NAME, _HOST = "idle", "127.0.0.1"
_POLL_SECONDS = 0.05


def token_seconds(compute_type: ComputeType) -> float:
    """Of each token of an answer. Raises InputError where the gateway does not start or answer."""
    with tempfile.TemporaryDirectory() as folder, idle_pipeline(WIDTH, compute_type, MOST_STEP_TOKENS) as pipeline:
        _write_tokenizer(Path(folder))
        with _gateway(Path(folder), pipeline) as (process, port):
            _drive(port, 1)  # what is made once
            before = processor_seconds(process)
            tokens = _drive(port, REQUESTS_EACH)
            return (processor_seconds(process) - before) / tokens


@contextmanager
def _gateway(folder: Path, pipeline: IdlePipeline) -> Iterator[tuple[int, int]]:
    """Its process and its port, once it answers."""
    key, port, control = uuid4().hex, _free_port(), _free_port()
    command = [
        *GATEWAY,
        "--model-uri",
        str(folder),
        "--served-model-name",
        _NAME,
        "--port",
        str(port),
        "--control-port",
        str(control),
    ]
    environment = {**os.environ, "STRATA_CONTROL_KEY": key}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as gateway:  # noqa: S603  our own
        try:
            _route(control, key, pipeline)
            _await_answer(gateway, port)
            yield gateway.pid, port
        finally:
            gateway.terminate()


def _route(port: int, key: str, pipeline: IdlePipeline) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as control:
        connect(control, f"tcp://{_HOST}:{port}", Keys.of(key), LARGEST_CONTROL_BYTES)
        control.send(encode(SetRoute(1, pipeline.key, (pipeline.leader,), PROMPT + ANSWER)))
        control.send(encode(GetStatus()))
        heard = all(control.poll(int(START_SECONDS * 1000)) and control.recv_multipart() for _ in range(2))
        control.setsockopt(zmq.LINGER, 0)
    if not heard:
        raise InputError(
            f"the gateway that is measured did not start within {START_SECONDS:g} s; measure again when the machine is quieter"
        )


def _await_answer(gateway: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and gateway.poll() is None:
        with suppress(OSError, http.client.HTTPException, InputError):
            _ask(port)
            return
        time.sleep(_POLL_SECONDS)
    raise InputError(
        "the gateway that is measured does not answer; its log: python -m strata_runtime.gateway --help starts one"
    )


def _drive(port: int, each: int) -> int:
    """Tokens of the answers to clients that ask one after the other."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(lambda _: sum(_ask(port) for _ in range(each)), range(CLIENTS)))


def _ask(port: int) -> int:
    body = {
        "model": _NAME,
        "prompt": [0] * PROMPT,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": uuid4().hex,
    }
    connection = http.client.HTTPConnection(_HOST, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise InputError(f"the gateway that is measured answers {answer.status}: {told[:200].decode(errors='replace')}")
    return int(json.loads(told)["usage"]["completion_tokens"])


def processor_seconds(process: int) -> float:
    """Of all threads that a process has or had."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind((_HOST, 0))
        return int(any_port.getsockname()[1])


def _write_tokenizer(folder: Path) -> None:
    """Of the tokens that the idle pipeline knows."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106  no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2}), encoding="utf-8")
