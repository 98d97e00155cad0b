"""Whatever the API server refuses while nodes flap, and however often: when it stops, everything is there, once, and nothing is complained of."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operator.fake_api import FakeApi, Request, serving
from tests.operator.test_cli import CONFIG
from tests.operator.test_controller import LLMDS, a_controller, a_deployment, a_node, look_and_plan

FAULTS = (
    (403, "exceeded quota"),
    (409, "modified"),
    (422, "invalid"),
    (429, "too many"),
    (500, "webhook"),
    (503, "away"),
)
ROUNDS = 4  # of faults


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    """Three nodes, three deployments that would each take any of them."""
    (tmp_path / "config.json").write_text(CONFIG)
    fake = FakeApi()
    for name in "abc":
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
        fake.put(f"{LLMDS}/llm-{name}", a_deployment(f"llm-{name}", tmp_path, placement={"maxStages": 1}))
    with serving(fake) as url:
        fake.url = url
        yield fake


@pytest.mark.parametrize("seed", [1, 2])
async def test_when_faults_end_everything_is_there_once(
    api: FakeApi, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)

    def at_will(request: Request) -> tuple[int, str] | None:
        return chance.choice(FAULTS) if request.method != "GET" and chance.random() < 0.4 else None

    monkeypatch.setattr("strata_operator.decide.backoff.MOST_SECONDS", 0.0)
    monkeypatch.setattr("strata_operator.act.controller.FIRST_ANSWERS_SECONDS", 0.0)
    controller = a_controller(api)
    api.refuse = at_will
    for _ in range(ROUNDS):
        flapping = chance.choice("abc")
        set_ready(api, flapping, "Unknown")  # long enough to count as lost
        await look_and_plan(controller)
        check_dealt_once(api)
        set_ready(api, flapping, "True")
        await look_and_plan(controller)
    api.refuse = lambda _: None
    for _ in range(4):
        await look_and_plan(controller)
    await controller.close()
    nodes = []
    for name in ("llm-a", "llm-b", "llm-c"):
        status: dict[str, Any] = api.objects[f"{LLMDS}/{name}"]["status"]
        conditions = {each["type"]: each["status"] for each in status["conditions"]}
        assert (status["phase"], conditions["Rendered"]) == ("Loading", "True")
        assert "ReconcileError" not in conditions
        nodes += [stage["node"] for stage in status["stages"]]
        made = {thing["kind"] for path, thing in api.objects.items() if f"/{name}" in path and "kind" in thing}
        assert made >= {"StatefulSet", "Deployment", "Service", "Secret", "NetworkPolicy", "ServiceAccount"}
    assert sorted(nodes) == ["a", "b", "c"]  # no device is dealt twice


def set_ready(api: FakeApi, name: str, status: str) -> None:
    api.objects[f"/api/v1/nodes/{name}"]["status"]["conditions"][0]["status"] = status


def check_dealt_once(api: FakeApi) -> None:
    """By the newest record of each deployment."""
    newest: dict[str, tuple[int, str]] = {}
    for path, thing in api.objects.items():
        if "/configmaps/" in path:
            labels, plan = thing["metadata"]["labels"], json.loads(thing["data"]["plan.json"])
            (stage,) = plan["replicas"][0]["stages"]
            of = labels["app.kubernetes.io/instance"]
            newest[of] = max(newest.get(of, (0, "")), (int(labels["strata.dev/epoch"]), stage["slot"].split("-")[2]))
    dealt = [node for _, node in newest.values()]
    assert len(set(dealt)) == len(dealt), newest
