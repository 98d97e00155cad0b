"""Other engines' servers of OpenAI's API, each a process in an environment of its own: vLLM's and llama.cpp's own `llama-server`. Used by `benchmarks.serving_peers`."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attack.target import HOST
from benchmarks.peers.environments import NotInstalledError, Peer
from benchmarks.peers.process import ROOT, PeerError
from benchmarks.slots import free_address

NAME = "bench"
PATIENCE_SECONDS = 240.0  # vLLM imports and compiles for most of a minute
_KILL_SECONDS = 30.0
_VLLM_BLOCK = 128  # tokens: what its processor backend takes by itself; it keeps one block that it never fills
_ONE_STEP = 1024  # tokens of a prompt
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Wish:
    """What to serve: KV of so many tokens, shared by all streams. `drafts`: tokens that are guessed by n-grams, of each step."""

    model: Path
    longest: int
    pool_tokens: int
    streams: int
    threads: int
    drafts: int = 0


@dataclass(frozen=True)
class Serving:
    """A server that answers. `setting`: what it was started with, of those that are tried. `form`: the field that holds an answer to a schema."""

    title: str
    setting: str
    port: int
    form: str = "structured_outputs"


@dataclass(frozen=True)
class Kind:
    """How a peer's server is started: command by interpreter, wish, setting and port. Settings: each is tried, the best one's figure counts."""

    settings: Callable[[Wish], Mapping[str, Sequence[str]]]
    command: Callable[[Path, Wish, int], Sequence[str]]
    environment: Callable[[Path], Mapping[str, str]]
    form: str


@contextmanager
def served_by(peer: Peer, python: Path, wish: Wish, setting: str, scratch: Path) -> Iterator[Serving]:
    """Ready on entry, ended on exit. Raises PeerError, and NotInstalledError where the environment has no server."""
    kind, port = KINDS[peer.name], free_address().control_port
    command = [*kind.command(python, wish, port), *kind.settings(wish)[setting]]
    log = scratch / f"{peer.name}-{port}.log"
    own = {"OMP_NUM_THREADS": str(wish.threads), "HF_HUB_OFFLINE": "1", **kind.environment(python)}
    with log.open("w") as told:
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=told, stderr=subprocess.STDOUT)
    try:
        _await_ready(process, peer.title, port, log)
        yield Serving(peer.title, setting, port, kind.form)
    finally:
        process.terminate()
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], title: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_SECONDS)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("\n".join(lines[-20:]) + "\n")
    raise PeerError(f"{title} did not serve: {lines[-1] if lines else 'without a word'}")


def _vllm_settings(wish: Wish) -> Mapping[str, Sequence[str]]:
    """Tokens of a step, of which a long prompt may take half, so that a short one need not wait for it. Short prompts fit into any."""
    if wish.longest <= _ONE_STEP:
        return {"2048 tokens a step": ["--max-num-batched-tokens", "2048"]}
    return {
        f"{tokens} tokens a step": [
            *("--max-num-batched-tokens", str(tokens)),
            *("--long-prefill-token-threshold", str(tokens // 2)),
        ]
        for tokens in (128, 2048)
    }


def _vllm_command(python: Path, wish: Wish, port: int) -> list[str]:
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(wish.model)]
    command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(wish.longest), "--max-num-seqs", str(wish.streams)]
    command += [
        "--block-size",
        str(_VLLM_BLOCK),
        "--num-gpu-blocks-override",
        str(1 - (-wish.pool_tokens // _VLLM_BLOCK)),
    ]
    command += ["--enable-prefix-caching", "--enable-chunked-prefill"]
    if wish.drafts:
        drafts = {"method": "ngram", "num_speculative_tokens": wish.drafts, "prompt_lookup_max": 4}
        command += ["--speculative-config", json.dumps(drafts)]
    return command


def _vllm_environment(_: Path) -> Mapping[str, str]:
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def _llama_settings(_: Wish) -> Mapping[str, Sequence[str]]:
    return {f"-ub {rows}": ["-ub", str(rows), "-b", str(max(rows, 512))] for rows in (64, 512)}


def _llama_command(python: Path, wish: Wish, port: int) -> list[str]:
    command = [
        str(_llama_installed(python) / "bin" / "llama-server"),
        "-m",
        str(_gguf(python, wish.model)),
        "--alias",
        NAME,
        "--host",
        HOST,
    ]
    command += ["--port", str(port), "-t", str(wish.threads), "-tb", str(wish.threads), "-np", str(wish.streams)]
    command += ["-c", str(wish.pool_tokens), "--kv-unified", "--cache-reuse", "64", "--cache-ram", "0", "--no-webui"]
    if wish.drafts:
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"]
        command += ["--spec-ngram-simple-size-m", str(wish.drafts)]
    return command


def _llama_environment(python: Path) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": str(_llama_installed(python) / "lib")}


def _llama_installed(python: Path) -> Path:
    """Where llama.cpp's own build puts `bin` and `lib`. Raises NotInstalledError."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    if not (packages / "bin" / "llama-server").exists():
        raise NotInstalledError(f"{python.parent.parent} was built without llama-server: remove that folder")
    return packages


def _gguf(python: Path, model: Path) -> Path:
    file = model / "llama-16.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        command = [str(python), "-m", "benchmarks.peers.gguf_file", str(model), str(part)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        part.rename(file)
    return file


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(_vllm_settings, _vllm_command, _vllm_environment, "structured_outputs"),
    "llama_cpp": Kind(_llama_settings, _llama_command, _llama_environment, "json_schema"),
}
