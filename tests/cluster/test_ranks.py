"""A stage over two ranks in one pod: a node whose processors are two devices, text as of one device, and a rank that is killed.

One deployment on `node-a`, first on one device of it, then on both. Tokens are compared in fp32.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deployed import Deployed, manifest, stream
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = "<|user|>\nWhat does json.dumps do?<|end|>\n<|assistant|>\n"
TOKENS = 96
COUNT_LABEL = "strata.dev/device.count"


def placement(degree: int) -> dict[str, Any]:
    """One replica of one stage, of so many devices."""
    here = {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}
    return {**here, "maxStages": 1, "maxReplicas": 1, "tensorParallel": [degree]}


@pytest.fixture(scope="module")
def chat(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    """Ready on one of the node's two devices; the namespace and the label end with the module."""
    namespace = f"ranks-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "node", "node-a", f"{COUNT_LABEL}=2")
    try:
        chat = Deployed(cluster, operator, manifest("chat", namespace, placement=placement(1)))
        chat.apply()
        chat.wait_ready()
        yield chat
    finally:
        cluster.kubectl("label", "node", "node-a", f"{COUNT_LABEL}-")
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> str:
    """What one device answers."""
    (pod,) = chat.pods("slot").values()
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "1"
    return text_of(chat)


def text_of(chat: Deployed) -> str:
    with chat.client() as client:
        answer = client.completions.create(
            model=chat.name, prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    text = answer.choices[0].text
    assert len(set(text.split())) > 10, f"a text that repeats itself would hide a slip: {text}"
    return text


def test_two_ranks_in_a_pod_answer_as_one_device_does(chat: Deployed, expected: str) -> None:
    epoch, steps = chat.get()["status"]["committedEpoch"], Steps("tensorParallel 1 -> 2")
    chat.apply(placement=placement(2))
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready with two ranks")
    steps.mark("Ready")
    (stage,) = status["stages"]
    assert stage["node"] == "node-a"
    (pod,) = chat.pods("slot").values()
    (box,) = pod["spec"]["containers"]
    assert box["resources"]["requests"]["cpu"] == "2"
    assert box["command"][-2:] == ["--ranks", "2"]
    assert len(family_of(stage["slot"])) == 3  # the slot, the process that ranks are forked from, the other rank
    assert text_of(chat) == expected


def test_a_rank_that_is_killed_in_its_pod_is_replaced(chat: Deployed, expected: str) -> None:
    (stage,) = chat.get()["status"]["stages"]
    epoch, before = chat.get()["status"]["committedEpoch"], chat.pods("slot")
    slot, nursery, rank = family_of(stage["slot"])
    steps = Steps("kill -9 of a rank in its pod")
    os.kill(rank, signal.SIGKILL)
    chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready in a new epoch")
    steps.mark("Ready")
    after = family_of(stage["slot"])
    assert after[:2] == [slot, nursery]
    assert after[2] != rank
    assert {name: pod["metadata"]["uid"] for name, pod in chat.pods("slot").items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert text_of(chat) == expected


def test_a_stream_goes_on_where_a_rank_is_killed_meanwhile(chat: Deployed, expected: str) -> None:
    (stage,) = chat.get()["status"]["stages"]
    with chat.client(120) as client:
        pieces = stream(client, chat.name, PROMPT, TOKENS)
        text = next(pieces)
        os.kill(family_of(stage["slot"])[-1], signal.SIGKILL)
        text += "".join(pieces)
    assert text == expected


def family_of(slot: str) -> list[int]:
    """The one process here that runs this slot and what it has forked, parents first."""
    wanted = f"strata_runtime.pipeline.slot\0--name\0{slot}\0"
    found = {
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if wanted in path.read_text(errors="replace")
    }
    (first,) = (process for process in found if _parent(process) not in found)
    order = [first]
    for process in order:
        order += sorted(child for child in found if _parent(child) == process)
    return order


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
