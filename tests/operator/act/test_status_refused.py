"""Nobody may write status, for as long as it lasts: losses are repaired all the same, and it is written once it can be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.act.test_controller import LLMDS, a_controller, a_deployment, a_node, look_and_plan
from tests.operator.commands.test_cli import CONFIG
from tests.operator.fake_api import FakeApi, Request, serving

RECORDS = "/api/v1/namespaces/ns/configmaps/chat-epoch-"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    """Three nodes, of which the deployment takes one."""
    (tmp_path / "config.json").write_text(CONFIG)
    fake = FakeApi()
    for name in ("a", "b", "c"):
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
    fake.put(f"{LLMDS}/chat", a_deployment("chat", tmp_path, placement={"maxStages": 1}))
    with serving(fake):
        yield fake


def no_status(request: Request) -> tuple[int, str] | None:
    return (403, "forbidden") if request.path.endswith("/status") else None


async def test_losses_are_repaired_and_status_is_written_when_it_can_be(api: FakeApi) -> None:
    api.refuse = no_status
    controller = a_controller(api)
    await look_and_plan(controller)
    for number in (1, 2):
        record = api.objects[f"{RECORDS}{number}"]
        used = next(name for name in "abc" if f'"chat-{name}-cpu"' in record["data"]["plan.json"])
        del api.objects[f"/api/v1/nodes/{used}"]
        for _ in range(2):
            await look_and_plan(controller)
        assert f"{RECORDS}{number + 1}" in api.objects
    assert not api.objects[f"{LLMDS}/chat"].get("status")
    assert len(api.wrote("PATCH", "/status")) <= 5  # it is tried later and later
    api.refuse = lambda _: None
    (kept,) = controller._kept.values()
    kept.refusals.clear()  # as if its back-off were over
    await controller.look()
    status = api.objects[f"{LLMDS}/chat"]["status"]
    assert status["plan"]["epoch"] == 3
    assert (status["backoff"]["last"], kept.unsaid) == ("NodeLost: epoch 3", None)
    await controller.close()


async def test_what_somebody_else_has_written_counts_again(api: FakeApi) -> None:
    api.refuse = no_status
    controller = a_controller(api)
    await look_and_plan(controller)
    (kept,) = controller._kept.values()
    assert kept.unsaid is not None
    api.objects[f"{LLMDS}/chat"]["status"] = {"phase": "Loading", "committedEpoch": 0, "image": "another:2"}
    await controller.look()
    gateway = api.objects["/apis/apps/v1/namespaces/ns/deployments/chat-gateway"]
    assert gateway["spec"]["template"]["spec"]["containers"][0]["image"] == "another:2"
    await controller.close()
