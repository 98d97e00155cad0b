"""A slot dies under a stream, the others take over, and it is planned with again when it is back: with the real runtime."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata_operator.local import losses
from strata_operator.local.deployment import LocalDeployment, LocalOptions
from strata_operator.local.mending import Mender
from strata_operator.local.ports import free_port
from strata_operator.render.records import Weighed
from strata_planner.contract.plan import Plan
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Takeover
from tests.operator.local.streaming import stream
from tests.operator.local.supervised import planned
from tests.operator.local.test_local_deployment import until
from tests.operator.local.test_up_end_to_end import make_model

TOKENS = 400
# Five processes of the real runtime: test_losses.py decides, test_local_deployment.py plans.
pytestmark = pytest.mark.slow


class GrowsBack(Mender):
    """The plan with all slots, when all are there: of so small a model the planner would rather have fewer."""

    def __init__(self, request: PlanRequest, whole: Plan) -> None:
        super().__init__(request, Takeover(), min_gain=0.1)
        self._whole = whole

    def improved(self, plan: Plan) -> Plan:
        return plan if self._lost else self._whole


@pytest.fixture
async def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalDeployment]:
    """It takes over whatever is lost, and believes soon that it is back."""
    monkeypatch.setattr(losses, "weigh", lambda *_: Weighed("takeover", 9.0, 1.0))
    monkeypatch.setattr(losses, "STEADY_SECONDS", 0.5)
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model")
    plan, request = planned(tmp_path / "model")
    options = LocalOptions("tiny", tmp_path, port=free_port("127.0.0.1"), mender=GrowsBack(request, plan))
    async with LocalDeployment(plan, options) as made:
        await made.ready()
        yield made


@pytest.mark.parametrize("victim", ["tiny-a-cpu", "tiny-b-cpu"])
async def test_a_slot_is_taken_over_and_planned_with_again_under_a_stream(
    deployment: LocalDeployment, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    whole = deployment.plan
    pieces: list[str] = []

    def read() -> str:
        pieces.extend(stream(deployment.options.port, [5, 9, 2], "tiny", max_tokens=TOKENS))
        return "".join(pieces)

    expected = await asyncio.to_thread(read)
    pieces.clear()
    reading = asyncio.create_task(asyncio.to_thread(read))
    await until(lambda: len(pieces) > 10, "begun")
    before = dict(deployment.pids)
    os.kill(before[victim], signal.SIGKILL)
    await until(lambda: victim not in {stage.slot for stage in deployment.plan.stages}, "taken over")
    await until(lambda: deployment.plan is whole, "planned with again")
    await until(lambda: len({each.committed_epoch for each in deployment.slot_statuses.values()}) == 1, "grown back")
    assert await reading == expected
    others = {name: pid for name, pid in deployment.pids.items() if name != victim}
    assert others == {name: pid for name, pid in before.items() if name != victim}
    assert caplog.text.count("the plan has changed") == 2
    assert "a restart takes 9 s, a takeover 1 s, as predicted: takeover" in caplog.text
    assert f"{victim} is there again" in caplog.text
    assert "requests waited, 0 were lost" in caplog.text
