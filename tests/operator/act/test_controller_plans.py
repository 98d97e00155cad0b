"""Plans that the controller waits for, drops or takes: it keeps nobody waiting, and asks with what the spec names."""

import asyncio
from pathlib import Path

import msgspec

from strata_operator.act.controller import Controller
from strata_operator.act.planner_call import Answer, Question
from tests.operator.act.test_controller import (
    LLMDS,
    OPTIONS,
    InThread,
    a_deployment,
    look_and_plan,
    looked,
)
from tests.operator.act.test_controller_faults import condition, epochs
from tests.operator.fake_api import FakeApi
from tests.operator.observe.test_kube import kube_of


class Never:
    """A planner that is not done before it is told."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.asked: list[str] = []

    async def answer(self, question: Question) -> Answer:
        self.asked.append(question.deployment["metadata"]["name"])
        await self.done.wait()
        return await InThread().answer(question)

    def warm(self) -> None: ...

    async def close(self) -> None: ...


async def test_a_plan_that_takes_long_keeps_nobody_waiting(api: FakeApi) -> None:
    await looked(api, 2)
    chat = api.objects[f"{LLMDS}/chat"]
    chat["spec"]["workload"]["concurrency"] = 3
    slow = Never()
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, slow)
    del api.objects["/apis/apps/v1/namespaces/ns/deployments/odd-gateway"]
    for _ in range(3):
        await controller.look()
    assert slow.asked == ["chat"]  # once, however often it is looked at
    assert "/apis/apps/v1/namespaces/ns/deployments/odd-gateway" in api.objects
    slow.done.set()
    await look_and_plan(controller)
    assert epochs(api, "chat") == ["chat-epoch-1", "chat-epoch-2"]
    await controller.close()


async def test_a_plan_for_what_is_not_wished_any_more_is_not_taken(api: FakeApi) -> None:
    slow = Never()
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, slow)
    await controller.look()
    api.objects[f"{LLMDS}/chat"]["spec"]["workload"]["concurrency"] = 1
    await controller.look()
    slow.done.set()
    await look_and_plan(controller)
    assert slow.asked.count("chat") == 2
    record = api.objects["/api/v1/namespaces/ns/configmaps/chat-epoch-1"]
    assert '"concurrency":1' in record["data"]["plan.json"]
    await controller.close()


async def test_a_hub_that_is_busy_is_no_failure(api: FakeApi) -> None:
    class Busy(InThread):
        async def answer(self, question: Question) -> Answer:
            return Answer(None, "ModelUnavailable", "the hub answers 503", passing=True)

    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, Busy())
    for _ in range(4):
        await look_and_plan(controller)
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Planning"
    assert condition(api, "chat", "Planned")["reason"] == "ModelUnavailable"
    await controller.close()


async def test_a_gated_models_token_reaches_the_planner_and_its_absence_is_said(api: FakeApi) -> None:
    tokens = []

    class Reading(InThread):
        async def answer(self, question: Question) -> Answer:
            tokens.append(question.token)
            return Answer(None, "Infeasible", "no")

    model = {"uri": "hf://owner/gated", "tokenSecretRef": {"name": "hf", "key": "token"}}
    api.objects[f"{LLMDS}/chat"]["spec"]["model"] = model
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, Reading())
    await look_and_plan(controller)
    await controller.look()
    assert "the Secret ns/hf is not there; create it" in condition(api, "chat", "Planned")["message"]
    await controller.close()
    api.put(
        "/api/v1/namespaces/ns/secrets/hf",
        {"metadata": {"name": "hf", "namespace": "ns"}, "data": {"token": "c2VjcmV0Cg=="}},
    )
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, Reading())
    await controller.look()  # which writes down that nothing is waited for any more
    await look_and_plan(controller)
    assert "secret" in tokens
    await controller.close()


async def test_a_model_of_the_hub_is_resolved_once_and_by_a_change_of_the_spec_alone(api: FakeApi, model: Path) -> None:
    """As if the hub had named a commit: the plan has it, and a loss does not ask for another one."""
    asked = []
    local = a_deployment("chat", model)["spec"]["model"]

    class Resolving(InThread):
        async def answer(self, question: Question) -> Answer:
            thing = question.deployment
            asked.append((thing["metadata"]["name"], question.model_uri))
            here = msgspec.structs.replace(
                question, model_uri="", running=None, deployment={**thing, "spec": {**thing["spec"], "model": local}}
            )
            answer = await super().answer(here)
            assert answer.plan is not None
            return Answer(msgspec.structs.replace(answer.plan, model_uri="hf://owner/name@" + "0" * 40))

    del api.objects[f"{LLMDS}/odd"]
    spec = api.objects[f"{LLMDS}/chat"]["spec"]
    spec |= {"model": {"uri": "hf://owner/name", "maxModelLen": 128}, "placement": {}}
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, Resolving())
    await look_and_plan(controller)
    await controller.look()
    gateway = api.objects["/apis/apps/v1/namespaces/ns/deployments/chat-gateway"]
    assert "hf://owner/name@" + "0" * 40 in gateway["spec"]["template"]["spec"]["containers"][0]["command"]
    used = api.objects[f"{LLMDS}/chat"]["status"]["stages"][0]["node"]
    del api.objects[f"/api/v1/nodes/{used}"]
    await look_and_plan(controller)
    spec["workload"]["concurrency"] = 1
    await controller.look()  # which writes down that the loss was repaired
    await look_and_plan(controller)
    assert asked == [("chat", ""), ("chat", "hf://owner/name@" + "0" * 40), ("chat", "")]
    await controller.close()
