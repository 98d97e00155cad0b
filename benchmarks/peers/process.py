"""An engine in its process, asked for one cell at a time: the other side of `served`. Used by `benchmarks.engine`."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Peer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 600.0  # converting, loading and trying all settings
_KILL_SECONDS = 30.0


class PeerError(Exception):
    """An engine that did not load or serve, and its last words."""


class PeerProcess:
    """Loaded when this returns. Raises PeerError. `python`: of its environment."""

    def __init__(self, peer: Peer, python: Path, model: Path, bits: int, cores: Sequence[int], scratch: Path) -> None:
        self.title = peer.title
        self._log = scratch / f"{peer.name}-{bits}-{len(cores)}.log"
        command = [str(python), "-m", f"benchmarks.peers.{peer.module}", "--model", str(model)]
        command += ["--bits", str(bits), "--scratch", str(scratch), "--threads", str(len(cores))]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        os.sched_setaffinity(self._process.pid, cores)  # before it starts threads: they inherit it
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, sequences: int, prompt: int, answer: int) -> tuple[float, float, str]:
        """Seconds until all sequences have their first token, until all have their last, and the setting that was the fastest."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"sequences": sequences, "prompt": prompt, "answer": answer}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._last_words()) from error
        told = self._answer()
        return told["first"], told["last"], told["setting"]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE_SECONDS):
                raise PeerError(f"{self.title} says nothing for {PATIENCE_SECONDS:g} s; see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        sys.stderr.write("\n".join(lines[-20:]) + "\n")
        return f"{self.title} ended: {lines[-1] if lines else 'without a word'}"
