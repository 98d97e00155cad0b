"""One LLMDeployment on three unlike nodes, from `kubectl apply` to its end: real pods, real tokens, real losses.

The tests follow one deployment through its life in the order of this file, each leaving it Ready for the next. Tokens are
compared in fp32 with transformers' own `generate`, also where a slot or a node is lost while they stream.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.deployed import Deployed, condition, holds, manifest, stream
from tests.cluster.operator_release import MODELS, NODE, OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.processes import wait_until
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

QUESTION = "What does json.dumps do?"
PROMPT = f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n"
LONG = 160  # tokens of an answer that is still being streamed when something is lost
WORKERS = {"node-a", "node-b", "node-c"}


@pytest.fixture(scope="module")
def chat(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    """Applied and Ready, three stages; the namespace ends with the module."""
    namespace = f"chat-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", namespace)
    chat = Deployed(cluster, operator, manifest("chat", namespace, placement={"minStages": 3}))
    steps = Steps("apply")
    chat.apply()
    chat.wait(holds("Planned"), "Planned", 60)
    steps.mark("planned")
    chat.wait_pods_running()
    steps.mark("pods running")
    chat.wait_ready()
    steps.mark("Ready")
    with chat.client() as client:
        next(iter(stream(client, "chat", PROMPT, 1)))
    steps.mark("first token")
    yield chat
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


class Transformers:
    """The whole model in one process, greedy and in fp32: LONG tokens at most."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  heavy, and needed by few
        import transformers  # noqa: PLC0415  same

        torch.set_num_threads(1)
        folder = str(MODELS / "strata-tiny")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def complete(self, text: str) -> str:
        """What follows, the end of the text ignored."""
        return self._generate(self.tokenizer(text, return_tensors="pt"), eos_token_id=None)

    def answer(self, question: str) -> str:
        """What follows in a conversation, until it ends."""
        messages = [{"role": "user", "content": question}]
        made = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(made)

    def _generate(self, prompt: Any, **options: Any) -> str:
        tokens = self._model.generate(**prompt, max_new_tokens=LONG, do_sample=False, pad_token_id=0, **options)
        made = tokens[0, prompt["input_ids"].shape[1] :].tolist()
        assert len(set(made)) >= 40, f"a text that repeats itself would hide a slip: {made}"
        return str(self.tokenizer.decode(made, skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference() -> Transformers:
    return Transformers()


@pytest.fixture(scope="module")
def expected(reference: Transformers) -> str:
    """What follows PROMPT."""
    return reference.complete(PROMPT)


def streamed_through(chat: Deployed, happens: Callable[[], None], steps: Steps) -> str:
    """The text of a long answer in whose middle something happens. Marks the end of the longest pause in it."""
    with chat.client(120) as client:
        pieces = stream(client, chat.name, PROMPT, LONG)
        text = next(pieces) + next(pieces)
        happens()
        steps.mark("done to it")
        heard, pause, goes_on = time.monotonic(), 0.0, steps.now()
        for piece in pieces:
            text += piece
            silence = time.monotonic() - heard
            heard += silence
            if silence > pause:
                pause, goes_on = silence, steps.now()
    steps.happened("stream goes on", timedelta(seconds=goes_on))
    steps.mark("stream complete")
    return text


def test_an_applied_object_ends_ready_on_three_unlike_nodes(chat: Deployed, cluster: Cluster) -> None:
    status = chat.get()["status"]
    assert (status["phase"], status["stagesReady"], status["committedEpoch"]) == ("Ready", "3/3", 1)
    assert {stage["node"] for stage in status["stages"]} == WORKERS
    spans = [range(stage["layers"][0], stage["layers"][1] + 1) for stage in status["stages"]]
    assert [layer for span in spans for layer in span] == list(range(12))
    assert all(stage["bits"] == {"16": stage["layers"][1] - stage["layers"][0] + 1} for stage in status["stages"])
    assert all(stage["memoryMeasuredBytes"] for stage in status["stages"])
    slots = chat.pods("slot")
    assert {pod["spec"]["nodeName"] for pod in slots.values()} == WORKERS
    threads = {
        pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in slots.values()
    }
    assert threads == {"node-a": "2", "node-b": "1", "node-c": "1"}


def test_kubectl_shows_what_a_person_asks_for(chat: Deployed, cluster: Cluster) -> None:
    where = f"--namespace={chat.namespace}"
    header, row = (
        line.split("  ") for line in cluster.kubectl("get", "llmd", "chat", "-o", "wide", where).splitlines()
    )
    names, values = ([cell.strip() for cell in cells if cell.strip()] for cells in (header, row))
    shown = dict(zip(names, values, strict=True))
    predicted = chat.get()["status"]["plan"]["predicted"]["tokensPerSecond"]
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "chat",
        "MODEL": "file:///models/strata-tiny",
        "PHASE": "Ready",
        "READY": "True",
        "STAGES": "3/3",
        "GPUS": "3 x cpu",
        "TOKENS/S": f"{predicted:g}",
        "URL": f"http://chat-gateway.{chat.namespace}:8000",
        "GATEWAYS": "1/1",
    }
    told = {event["reason"]: event["message"] for event in chat.events()}
    assert "layers 0-" in told["Created"]
    assert told["Serving"].startswith("Ready: epoch 1 serves at http://chat-gateway")
    assert not [event for event in chat.events() if event["type"] == "Warning"]


def test_the_openai_client_gets_the_tokens_of_transformers(
    chat: Deployed, expected: str, reference: Transformers
) -> None:
    with chat.client() as client:
        assert [model.id for model in client.models.list()] == ["chat"]
        whole = client.completions.create(
            model="chat", prompt=PROMPT, max_tokens=LONG, temperature=0, extra_body={"ignore_eos": True}
        )
        assert whole.choices[0].text == expected
        assert whole.usage
        assert whole.usage.completion_tokens == LONG
        assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
        said = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": QUESTION}], max_tokens=LONG, temperature=0
        )
        assert said.choices[0].message.content == reference.answer(QUESTION)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt=PROMPT)


def test_nothing_carries_a_finalizer_and_everything_has_an_owner(chat: Deployed) -> None:
    objects = chat.objects()
    assert not [thing["metadata"]["name"] for thing in objects if thing["metadata"].get("finalizers")]
    unowned = [thing["kind"] for thing in objects if not thing["metadata"].get("ownerReferences")]
    assert unowned == ["LLMDeployment"]
    kinds = {thing["kind"] for thing in objects}
    assert kinds >= {
        "StatefulSet",
        "Deployment",
        "Service",
        "ConfigMap",
        "Secret",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }


def test_pods_without_the_tests_mounts_keep_the_restricted_profile(
    chat: Deployed, cluster: Cluster, namespace: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for number, thing in enumerate(chat.objects("statefulsets,deployments")):
        spec = thing["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        mounted = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
        assert mounted
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in mounted]
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] not in mounted]
        del spec["serviceAccountName"], spec["serviceAccount"]  # of the other namespace
        pod = {"name": f"dry-{number}", "namespace": namespace}
        cluster.dry_run({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec})


def test_the_operators_role_allows_all_that_it_asks(chat: Deployed, operator: OperatorRelease) -> None:
    assert chat.get()["status"]["phase"] == "Ready"
    said = operator.logs(lines=1000)
    assert "leads" in said
    assert "forbidden" not in said.lower()


def test_upgrading_the_chart_restarts_no_slot(chat: Deployed, operator: OperatorRelease, expected: str) -> None:
    before, events = _uids(chat), len(chat.events())
    steps = Steps("helm upgrade")
    other_image = {"repository": "strata.test/another", "tag": "2"}
    text = streamed_through(
        chat, lambda: operator.upgrade(runtimeImage=other_image, logLevel="DEBUG", podAnnotations={"a": "b"}), steps
    )
    assert text == expected
    operator.wait_looked()
    assert _uids(chat) == before
    assert chat.get()["status"]["image"] != "strata.test/another:2"
    operator.rollback()
    steps.mark("rolled back")
    operator.wait_looked()
    assert _uids(chat) == before
    assert (chat.get()["status"]["phase"], chat.get()["status"]["committedEpoch"]) == ("Ready", 1)
    assert [event["message"] for event in chat.events()[events:]] == []


@pytest.mark.parametrize("stage", [0, 2], ids=["leader", "last"])
def test_a_killed_slot_comes_back_and_its_stream_goes_on(chat: Deployed, expected: str, stage: int) -> None:
    status = chat.get()["status"]
    epoch, slot = status["committedEpoch"], status["stages"][stage]["slot"]
    steps = Steps(f"kill -9 of the slot of stage {stage}")
    text = streamed_through(chat, lambda: os.kill(_process_of(slot), signal.SIGKILL), steps)
    assert text == expected
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready in a new epoch")
    steps.mark("Ready")
    assert {stage["slot"]: stage["restarts"] for stage in status["stages"]}[slot] == 1
    assert {replan["reason"] for replan in status["replans"]} == {"SlotLost"}
    assert status["replans"][-1]["secondsToReady"] is not None


def test_a_slot_that_is_stopped_is_started_anew_and_its_stream_goes_on(chat: Deployed, expected: str) -> None:
    """Its node, its pod and its probe know nothing of it: the port goes on to take connections."""
    slot = chat.get()["status"]["stages"][1]["slot"]  # which has run since the beginning
    before = chat.pods("slot")[f"{slot}-0"]["metadata"]["uid"]
    steps = Steps("SIGSTOP of the slot of stage 1")
    text = streamed_through(chat, lambda: os.kill(_process_of(slot), signal.SIGSTOP), steps)
    chat.wait_ready()
    steps.mark("Ready")
    assert text == expected
    assert chat.pods("slot")[f"{slot}-0"]["metadata"]["uid"] != before
    assert "SlotHung" in {event["reason"] for event in chat.events()}


def test_another_spec_leads_to_another_plan(chat: Deployed) -> None:
    epoch = chat.get()["status"]["committedEpoch"]
    steps = Steps("minStages 3 -> 2")
    chat.apply(placement={"minStages": 2})
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready with a new plan")
    steps.mark("Ready")
    assert status["replans"][-1]["reason"] == "SpecChanged"
    assert 2 <= len(status["stages"]) <= 3
    wait_until(lambda: set(chat.pods("slot")) == {f"{s['slot']}-0" for s in status["stages"]}, "retired slots", 60)


def test_a_lost_node_is_replanned_and_the_stream_goes_on(chat: Deployed, cluster: Cluster, expected: str) -> None:
    (gateway,) = chat.pods("gateway").values()
    stages = chat.get()["status"]["stages"]
    lost = next(stage["node"] for stage in stages if stage["node"] != gateway["spec"]["nodeName"])
    steps, killed = Steps("kill of a node"), datetime.now(UTC)
    try:
        text = streamed_through(chat, lambda: cluster.kill_node(lost), steps)
        status = chat.wait(
            lambda now: now["phase"] == "Ready" and _node_lost(now) is not None, "Ready without the node"
        )
        steps.mark("Ready")
        told = _node_lost(status)
        assert told is not None
        for step in ("noticed", "planned", "prepared", "committed"):
            steps.happened(step, datetime.fromisoformat(told[f"{step}At"]) - killed)
        assert text == expected
        assert told["node"] == lost
        assert lost not in {stage["node"] for stage in status["stages"]}
        with chat.client() as client:
            assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
        assert "NodeLost" in {event["reason"] for event in chat.events()}
        wait_until(lambda: set(chat.pods("slot")) == {f"{s['slot']}-0" for s in status["stages"]}, "retired slots", 60)
    finally:
        cluster.restart_node(lost)
    chat.wait(lambda now: "3 devices" in condition(now, "Inventoried")["message"], "aware of the node's return")
    assert chat.get()["status"]["phase"] == "Ready"


def test_a_gateway_lost_with_its_node_is_replaced(chat: Deployed, cluster: Cluster, expected: str) -> None:
    """Its streams are lost with it; new requests are answered."""
    (gateway,) = chat.pods("gateway")
    cluster.kubectl("cordon", NODE.name)
    try:
        cluster.kubectl("delete", "pod", gateway, f"--namespace={chat.namespace}", "--timeout=60s")
        rollout = [f"deployment/{chat.name}-gateway", f"--namespace={chat.namespace}", "--timeout=60s"]
        cluster.kubectl("rollout", "status", *rollout)
    finally:
        cluster.kubectl("uncordon", NODE.name)
    ((gateway, pod),) = chat.pods("gateway").items()
    lost = pod["spec"]["nodeName"]
    assert lost in WORKERS
    chat.wait_ready()
    steps = Steps("kill of the gateway's node")
    try:
        cluster.kill_node(lost)
        chat.wait(lambda now: now["phase"] != "Ready", "aware of the loss")
        steps.mark("noticed")
        chat.wait_ready()
        steps.mark("Ready")
        with chat.client() as client:
            assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
    finally:
        cluster.restart_node(lost)
    wait_until(lambda: gateway not in chat.pods("gateway"), "end of the lost gateway", 60)
    chat.wait(lambda now: "3 devices" in condition(now, "Inventoried")["message"], "aware of the node's return")


def lasting_gateways(chat: Deployed) -> dict[str, Any]:
    """All of them, where none is about to go: all are of one template."""
    pods = chat.pods("gateway")
    templates = {each["metadata"]["labels"]["pod-template-hash"] for each in pods.values()}
    leaving = any("deletionTimestamp" in each["metadata"] for each in pods.values())
    return {} if leaving or len(templates) != 1 else pods


def test_a_stream_outlives_its_gateway(chat: Deployed, cluster: Cluster, expected: str) -> None:
    """Read at one gateway's own address, then at the Service, which leads to the other."""
    chat.apply(gateway={**chat.manifest["spec"]["gateway"], "replicas": 2})
    chat.wait(lambda now: now.get("gatewaysReady") == "2/2", "served by two gateways")
    wait_until(lambda: len(lasting_gateways(chat)) == 2, "end of the gateway that was alone", 60)
    victim, pod = next(iter(lasting_gateways(chat).items()))
    asked = {
        "model": chat.name,
        "prompt": PROMPT,
        "max_tokens": LONG,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers, text = {"Idempotency-Key": "one stream"}, ""
    wait_until(lambda: "keeps what this one keeps" in chat.logs(victim), "gateways that know each other", 30)
    steps = Steps("death of a gateway under its stream")
    place, done = f"http://{pod['status']['podIP']}:8000", False
    while not done and steps.now() < 60:
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{place}/v1/completions", json=asked, headers=headers, timeout=20) as answer,
        ):
            number = piece = ""
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    number = line[4:]
                elif line.startswith("data: {"):
                    piece = json.loads(line[6:])["choices"][0]["text"]
                elif not line and number:  # an event counts once it is whole
                    headers["Last-Event-ID"], text = number, text + piece
                    number = piece = ""
                done |= line == "data: [DONE]"
                if text and place != chat.url():
                    break
        if place != chat.url():
            place = chat.url()
            end = ("--grace-period=0", "--force")
            cluster.kubectl("delete", "pod", victim, f"--namespace={chat.namespace}", *end)
            steps.mark("killed")
    steps.mark("stream complete")
    assert text == expected
    wait_until(lambda: victim not in chat.pods("gateway"), "end of the gateway", 60)
    chat.wait(lambda now: now.get("gatewaysReady") == "2/2", "served by two gateways again")


def test_deleting_leaves_nothing_even_without_an_operator(chat: Deployed, operator: OperatorRelease) -> None:
    assert len(chat.objects()) > 15
    operator.scale(0)
    steps = Steps("kubectl delete without an operator")
    try:
        chat.delete()
        steps.mark("nothing left")
    finally:
        operator.scale(1)


def _node_lost(status: dict[str, Any]) -> dict[str, Any] | None:
    """The newest replan for that; a better plan may have followed it at once."""
    found: dict[str, Any] | None = next(
        (each for each in reversed(status["replans"]) if each["reason"] == "NodeLost"), None
    )
    return found


def _uids(chat: Deployed) -> dict[str, str]:
    pods = {**chat.pods("slot"), **chat.pods("gateway")}
    return {name: pod["metadata"]["uid"] for name, pod in pods.items()}


def _process_of(slot: str) -> int:
    """The one process here that runs this slot."""
    wanted = f"strata_runtime.pipeline.slot\0--name\0{slot}\0"
    (process,) = [
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if wanted in path.read_text(errors="replace")
    ]
    return int(process)
