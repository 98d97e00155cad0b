"""Scenes of `benchmarks.kills`: which deployment runs, what befalls it, and how it is started."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import apart, hanging_slot, pipeline
from benchmarks.deployment import Wishes
from benchmarks.faults import FaultKind, Injector
from benchmarks.truth import write_tokenizer
from strata_operator.commands.inputs import measured, read_question
from strata_operator.commands.up import UpOptions, local_options
from strata_operator.decide.planning import order_terms_of, takeover_of
from strata_operator.local.deployment import LocalDeployment, Programs
from strata_operator.local.mending import Mender
from strata_planner.replan.standing_orders import with_orders
from strata_planner.search.planning import make_plan

MODEL = Path("examples/models/strata-tiny").resolve()
STREAMS = 16
SILENCE_SECONDS = 10  # until orders count, the least that may be


@dataclass(frozen=True)
class Scene:
    """A deployment, and what befalls it. `share`: of the kills that are asked for; `faults`: each with its weight."""

    name: str
    wishes: Wishes
    faults: Mapping[FaultKind, int]
    share: float
    max_replicas: int = 1
    step_timeout: int | None = None  # seconds that a step may be still; None: by default
    losses: int = 0  # slots that it can lose for good before it is started anew; 0: none is
    orders: bool = False  # the plan has standing ones
    apart: bool = False  # each slot in a network namespace of its own
    is_large: bool = (
        False  # it serves the random model of 246M weights, whose tokens are words, in place of strata-tiny
    )

    @property
    def slots(self) -> int:
        """As it is started."""
        return self.wishes.stages * self.max_replicas

    @property
    def is_exact(self) -> bool:
        return self.wishes.compute_type == "float32"

    @property
    def lacks(self) -> str:
        """Why it cannot be played here; empty: it can."""
        return apart.missing() if self.apart else ""


def _wishes(stages: int, compute_type: str = "float32", device_bytes: int = 600_000_000) -> Wishes:
    return Wishes(
        MODEL, max_model_len=768, prompt_tokens=220, output_tokens=220, concurrency=STREAMS, stages=stages,
        compute_type=compute_type, device_bytes=device_bytes,
    )  # fmt: skip


_KILLS: Mapping[FaultKind, int] = {"kill": 8, "two at once": 1, "during the repair": 1}
_GONE: Mapping[FaultKind, int] = {"gone": 1, "gone late": 1}
_CUTS: Mapping[FaultKind, int] = {
    "cut off from its neighbours": 1,
    "cut off from the gateway": 1,
    "cut off from the controller": 1,
    "cut off from everybody": 1,
}
SCENES = (
    Scene("kill", _wishes(3), _KILLS, 1.0),
    Scene("hung", _wishes(3), {"hung": 1}, 0.1),
    Scene("stuck", _wishes(3), {"stuck": 2, "deaf": 1}, 0.1, step_timeout=3),
    Scene("replica", _wishes(2), {"kill": 1}, 0.2, max_replicas=2),
    Scene("replicas", _wishes(2), {"one of each replica": 1}, 0.1, max_replicas=2),
    Scene("gone", _wishes(3), _GONE, 0.12, losses=2),
    Scene("gone_246m", _wishes(3, "bfloat16", 2_000_000_000), _GONE, 0.12, losses=2, is_large=True),
    Scene("partition", _wishes(3), _CUTS, 0.24, apart=True),
    Scene("unattended", _wishes(3), {"killed unattended": 1}, 0.1),
    Scene("orders", _wishes(3), {"killed unattended": 1}, 0.1, orders=True),
    Scene("zombie", _wishes(3), {"back unattended": 1}, 0.06, orders=True, apart=True),
    Scene("bf16", _wishes(3, "bfloat16"), _KILLS, 0.2),
)


@contextlib.asynccontextmanager
async def deployed(scene: Scene, folder: Path) -> AsyncIterator[tuple[LocalDeployment, Injector]]:
    """As `strata up` starts it, but for the fewest stages, which a repair may go below: here they only force a split."""
    files = folder / "deployment.json", folder / "cluster.json"
    wishes = replace(scene.wishes, model=_large(folder)) if scene.is_large else scene.wishes
    cluster = replace(wishes, stages=scene.slots).cluster()
    for file, content in zip(files, (_described(scene, wishes), cluster), strict=True):
        file.write_text(json.dumps(content))
    question = measured(read_question(files[0], files[1], measure=False))
    free, takeover = replace(question.request, min_stages=1), takeover_of(question.deployment)
    plan = with_orders(free, make_plan(question.request).plan, takeover, wanted=scene.orders).plan
    logs = folder / "logs"
    logs.mkdir()
    with contextlib.ExitStack() as held:
        net = held.enter_context(apart.apart(sorted({stage.slot for stage in plan.stages}))) if scene.apart else None
        module = hanging_slot if net is None else apart
        programs = Programs(slot=module.__name__, hosts={} if net is None else net.hosts)
        up = UpOptions(files[0], files[1], "127.0.0.1", 0, None, logs, programs=programs)
        mender = Mender(free, takeover, question.deployment.spec.replanning.min_gain, orders=scene.orders)
        options = local_options(up, question, plan, logs)
        options = replace(options, mender=mender, orders=order_terms_of(question.deployment))
        injector = Injector(question.deployment.spec.replanning.grace_period_seconds, net)
        deployment = LocalDeployment(plan, options, lambda: injector.look(deployment))
        async with deployment:
            await deployment.ready()
            yield deployment, injector


def _large(folder: Path) -> Path:
    model = pipeline.make_model(folder)
    write_tokenizer(model, pipeline.SHAPES["vocab_size"])
    return model


def _described(scene: Scene, wishes: Wishes) -> Mapping[str, object]:
    described: dict[str, dict[str, Any]] = json.loads(json.dumps(wishes.deployment()))
    spec = described["spec"]
    spec["placement"] |= {"maxStages": wishes.stages, "maxReplicas": scene.max_replicas}
    if scene.step_timeout is not None:
        spec["runtime"]["stepTimeoutSeconds"] = scene.step_timeout
    if scene.orders:
        spec["replanning"] = {"takeover": {"standingOrders": {"silenceSeconds": SILENCE_SECONDS}}}
    return described
