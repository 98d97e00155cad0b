"""A local deployment of the real runtime over three slots, in a process of its own that tests may stop: `python -m tests.operator.local.supervised FOLDER PORT`.

Its plan has standing orders. FOLDER has the model and gets the logs. What it logs goes to stdout, with `ready` once it serves.
"""

import asyncio
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

from strata_operator.decide.standing_orders import OrderTerms
from strata_operator.local.deployment import LocalDeployment, LocalOptions
from strata_operator.local.mending import Mender
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Takeover
from strata_planner.replan.standing_orders import with_orders
from strata_planner.search.planning import make_plan

log = logging.getLogger(__name__)

SILENCE_SECONDS = 6.0  # its control connections ask each 4 s
GRACE_SECONDS = 0.5


def planned(model: Path) -> tuple[Plan, PlanRequest]:
    """A stage on each node, for the sake of the test: none has to be."""
    request = PlanRequest(
        deployment="tiny",
        model_uri=model.as_uri(),
        model=Model.from_config(json.loads((model / "config.json").read_text())),
        cluster=Cluster(tuple(Node(name, (Device("cpu", 1, 1 << 30, 1),)) for name in ("a", "b", "c"))),
        workload=Workload(16, 64, 6),
        max_model_len=512,
        allowed_bits=(16,),
        compute_type="float32",
        min_stages=3,
        max_replicas=1,
        time_limit_seconds=1.0,
    )
    free = replace(request, min_stages=1)
    return with_orders(free, make_plan(request, quick=True).plan, Takeover()).plan, free


async def main(folder: Path, port: int) -> None:
    plan, request = planned(folder / "model")
    options = LocalOptions(
        "tiny",
        folder,
        port=port,
        mender=Mender(request, Takeover(), min_gain=0.99, orders=True),
        orders=OrderTerms(SILENCE_SECONDS, GRACE_SECONDS),
    )
    async with LocalDeployment(plan, options) as deployment:
        await deployment.ready()
        log.info("ready")
        await deployment.supervise()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
