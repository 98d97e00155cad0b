"""`strata up` with the real runtime: a small random model over two slots, killed under a client's stream, then stopped."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from strata_operator.act.control_client import ask
from strata_operator.local.ports import free_port
from strata_operator.local.record import running_deployment
from strata_planner.contract.control import GetStatus, SlotStatus
from strata_runtime.model.random_model import make_random_model
from tests.laws import swept
from tests.operator.local import streaming
from tests.runtime.architectures import make_tiny_model

# Some ten processes: test_local_deployment.py has the supervisor, runtime/slot and runtime/gateway what it supervises.
pytestmark = pytest.mark.slow
ANSWER = 200
KILL_AFTER = 20
DEPLOYMENT = """
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: {name}}}
spec:
  model: {{uri: "file://{model}", maxModelLen: 512}}
  workload: {{promptTokens: 16, outputTokens: 64, concurrency: 2}}
  {how}
  precision: {{allowed: [{bits}]}}
  runtime: {{computeType: float32}}
"""
CLUSTER = """
nodes:
- {name: a, devices: [{type: cpu, memoryBytes: 620000000, threads: 1, profile: {layerOverheadSeconds: 0.0002}}]}
- {name: b, devices: [{type: cpu, memoryBytes: 620000000, threads: 1, profile: {layerOverheadSeconds: 0.0002}}]}
"""
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

Make = Callable[[Path], None]


class Up:
    """A running `strata up`: its address, what it says, and the process of each service."""

    def __init__(
        self,
        folder: Path,
        how: str = "placement: {minStages: 2}",
        name: str = "tiny",
        *,
        bits: int = 16,
        make: Make | None = None,
        cluster: str = CLUSTER,
    ) -> None:
        self.name = name
        model = folder / "model"
        model.mkdir()
        (make or make_model)(model)
        (folder / "tiny.yaml").write_text(DEPLOYMENT.format(model=model, how=how, name=name, bits=bits))
        (folder / "cluster.yaml").write_text(cluster)
        self.port = free_port("127.0.0.1")
        command = [sys.executable, "-m", "strata_operator.cli", "up", "-f", str(folder / "tiny.yaml")]
        self.process = subprocess.Popen(
            [*command, "--cluster", str(folder / "cluster.yaml"), "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids: dict[str, int] = {}
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ready_line = self._until_ready()
        except BaseException:  # a time-out too: nothing is left behind
            self.process.terminate()
            raise

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"(\S+) runs as process (\d+)", line):
                self.pids[found[1]] = int(found[2])

    def _until_ready(self) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("ready: "):
                return line.strip()
        raise AssertionError("".join(self.said))

    def stream(self, prompt: list[int], **more: Any) -> Iterator[str]:
        return streaming.stream(self.port, prompt, self.name, **{"max_tokens": ANSWER} | more)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe
            pipe.close()
        return code


def make_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)


def make_model(folder: Path) -> None:
    make_tokenizer(folder)
    make_random_model(folder, "llama", **SMALL)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up"))
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture(scope="module")
def expected(up: Up) -> str:
    """What the client gets when nothing happens."""
    return "".join(up.stream([5, 9, 2]))


def test_it_says_where_it_answers(up: Up, expected: str) -> None:
    assert up.ready_line == f"ready: http://127.0.0.1:{up.port}"
    assert len(expected.split()) == ANSWER


@pytest.mark.parametrize("victim", swept(["tiny-a-cpu", "tiny-b-cpu", "gateway"], ["tiny-a-cpu"]))
def test_a_killed_process_comes_back_and_the_stream_goes_on_with_the_same_tokens(
    up: Up, expected: str, victim: str
) -> None:
    killed = up.pids[victim]
    pieces = []
    if victim == "gateway":  # it holds the streams: those are lost, the next request is served
        os.kill(killed, signal.SIGKILL)
        pieces = list(_as_soon_as_it_answers(up))
    else:
        for piece in up.stream([5, 9, 2]):
            pieces.append(piece)
            if len(pieces) == KILL_AFTER:
                os.kill(killed, signal.SIGKILL)
    assert "".join(pieces) == expected
    assert up.pids[victim] != killed


def test_sampled_tokens_are_the_same_too(up: Up) -> None:
    wish = {"temperature": 1.0, "seed": 7}
    undisturbed = "".join(up.stream([1, 2, 3], **wish))
    pieces = []
    for piece in up.stream([1, 2, 3], **wish):
        pieces.append(piece)
        if len(pieces) == KILL_AFTER:
            os.kill(up.pids["tiny-b-cpu"], signal.SIGKILL)
    assert "".join(pieces) == undisturbed


def test_sigterm_ends_all_it_started(up: Up, expected: str) -> None:
    assert "".join(up.stream([5, 9, 2])) == expected  # whoever was killed before is back
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) >= 4  # launcher, two slots, gateway
    assert up.stop() == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def _as_soon_as_it_answers(up: Up) -> Iterator[str]:
    while True:
        try:
            yield from up.stream([5, 9, 2])
        except OSError:
            continue
        return


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("replicas"), "planning: {solver: layout, timeLimitSeconds: 1}", "twice")
    yield running
    if running.process.poll() is None:
        running.stop()


def test_the_loss_of_one_of_two_replicas_costs_the_other_nothing(replicas: Up) -> None:
    """Both stream; the one whose slot is killed is replayed, once. The other's leader, its cache and its counts stay."""
    long = {"max_tokens": 500}  # neither has ended before the loss
    expected = "".join(replicas.stream([5, 9, 2], **long))
    streams = [replicas.stream([5, 9, 2], **long) for _ in range(2)]  # routed by load: one to each
    pieces = [[next(stream)] for stream in streams]
    for begun, stream in zip(pieces, streams, strict=True):
        begun += [next(stream) for _ in range(KILL_AFTER)]
    before = status_of(replicas, "twice-a-cpu")
    os.kill(replicas.pids["twice-b-cpu"], signal.SIGKILL)
    answers = ["".join([*begun, *stream]) for begun, stream in zip(pieces, streams, strict=True)]
    assert answers == [expected, expected]
    while (after := status_of(replicas, "twice-a-cpu")).committed_epoch == 1:
        pass
    assert (after.incarnation, after.committed_epoch, after.roles[0].formed) == (before.incarnation, 2, 1)
    assert after.roles[0].steps > before.roles[0].steps > 0
    assert status_of(replicas, "twice-b-cpu").roles[0].formed == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{replicas.port}/metrics", timeout=60) as answer:
        (replays,) = re.findall(r"^strata_replays_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    assert float(replays) == 1


def status_of(up: Up, slot: str) -> SlotStatus:
    """Of a slot that runs now."""
    status = asyncio.run(ask(running_deployment(up.name).endpoint(slot), GetStatus()))
    assert isinstance(status, SlotStatus)
    return status


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Up]:
    both = CLUSTER.splitlines()[2].replace("memoryBytes", "count: 2, memoryBytes")
    running = Up(tmp_path, "placement: {tensorParallel: [2]}", "pair", cluster=f"nodes:\n{both}")
    yield running
    if running.process.poll() is None:
        running.stop()


UNLIKE = """
nodes:
- name: a
  devices:
  - {type: cpu, memoryBytes: 620000000, threads: 1, profile: {layerOverheadSeconds: 0.0002}}
  - {type: cpu, memoryBytes: 640000000, threads: 2, profile: {layerOverheadSeconds: 0.0002, bandwidthBytesPerSecond: 3.0e+10, flopsPerSecond: 3.0e+11}}
"""


def make_wider_model(folder: Path) -> None:
    """With heads and columns enough for unlike shares."""
    make_tokenizer(folder)
    make_random_model(folder, "llama", **(SMALL | {"intermediate_size": 512, "num_key_value_heads": 4}))


def test_two_unlike_processors_of_a_node_share_a_stage(tmp_path: Path) -> None:
    """Planned, started with the threads of each, and with the text of one."""
    texts = {}
    for name, degree in (("alone", 1), ("unlike", 2)):
        (tmp_path / name).mkdir()
        how = f"placement: {{tensorParallel: [{degree}], maxReplicas: 1, maxStages: 1}}"
        running = Up(tmp_path / name, how, name, make=make_wider_model, cluster=UNLIKE)
        try:
            texts[name] = "".join(running.stream([5, 9, 2]))
            (stage,) = running_deployment(name).plan.stages
            assert stage.tensor_parallel == degree
            assert stage.devices[0].index == 1, "the faster one leads"
            if degree == 2:
                slot = psutil.Process(running.pids[f"{name}-a-cpu"])
                assert stage.shares[0] > stage.shares[1]
                assert [device.threads for device in stage.devices] == [2, 1]
                (nursery,) = slot.children()
                assert len(nursery.children()) == 1
                status = status_of(running, f"{name}-a-cpu")
                assert status.private_bytes > status.idle_bytes > 0
        finally:
            running.stop()
    assert texts["unlike"] == texts["alone"]


@pytest.mark.parametrize(("kind", "ranks"), [("deepseek_v3", 2), ("qwen3_next", 2), ("llama", 3)])
def test_processors_share_latent_keys_layers_with_state_and_heads_that_they_do_not_divide(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    def make(folder: Path) -> None:
        make_tokenizer(folder)
        make_tiny_model(folder, kind, vocab_size=128, max_position_embeddings=512, bos_token_id=0, eos_token_id=1)

    texts = {}
    node = CLUSTER.splitlines()[2].replace("memoryBytes", f"count: {ranks}, memoryBytes")
    for name, degree in (("one", 1), ("shared", ranks)):
        (tmp_path / name).mkdir()
        how = f"placement: {{tensorParallel: [{degree}], maxReplicas: 1, maxStages: 1}}"
        running = Up(tmp_path / name, how, name, make=make, cluster=f"nodes:\n{node}")
        try:
            texts[name] = "".join(running.stream([5, 9, 2]))
            (stage,) = running_deployment(name).plan.stages
            assert stage.tensor_parallel == degree
        finally:
            running.stop()
    assert texts["shared"] == texts["one"]


def test_stages_of_two_processors_and_of_one_answer_as_transformers_does(tmp_path: Path) -> None:
    """An asymmetric layout: [2, 1], or the other way round."""
    first, second = CLUSTER.splitlines()[2:4]
    cluster = "\n".join(("nodes:", first.replace("memoryBytes", "count: 2, memoryBytes"), second))
    cluster = cluster.replace("profile: {", "profile: {bandwidthBytesPerSecond: 1.0e+6, ")  # two together are worth it
    how = "placement: {tensorParallel: [1, 2], minStages: 2, maxStages: 2, maxReplicas: 1}"
    running = Up(tmp_path, how, "asymmetric", make=make_wider_model, cluster=cluster)
    try:
        stages = running_deployment("asymmetric").plan.stages
        assert sorted(stage.tensor_parallel for stage in stages) == [1, 2]
        text = "".join(running.stream([5, 9, 2], max_tokens=48, ignore_eos=True))
    finally:
        assert running.stop() == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        (tokens,) = model.generate(
            torch.tensor([[5, 9, 2]]), do_sample=False, max_new_tokens=48, min_new_tokens=48, pad_token_id=0
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert text.split() == tokenizer.decode(tokens[3:]).split()


def test_ranks_and_what_forks_them_may_be_killed_and_end_with_the_rest(ranks: Up, expected: str) -> None:
    slot = psutil.Process(ranks.pids["pair-a-cpu"])
    for place in (1, 0, 1):
        (nursery,) = slot.children()
        family = [nursery, *nursery.children()]
        assert len(family) == 2
        pieces = []
        for piece in ranks.stream([5, 9, 2]):
            pieces.append(piece)
            if len(pieces) == KILL_AFTER:
                family[place].kill()
        assert "".join(pieces) == expected
    assert slot.is_running()
    started = psutil.Process(ranks.process.pid).children(recursive=True)
    assert ranks.stop() == 0
    assert not psutil.wait_procs(started, timeout=5)[1]
