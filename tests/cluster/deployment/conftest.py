"""The deployment whose life the tests here follow, in the order of their files, each leaving it Ready for the next."""

from collections.abc import Iterator

import pytest

from tests.cluster.deployed import Deployed, deployed, holds, stream
from tests.cluster.deployment.life import PROMPT, Transformers
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.timings import Steps


@pytest.fixture(scope="package")
def chat(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    """Applied and Ready, three stages."""
    with deployed(cluster, operator, "chat", placement={"minStages": 3}) as chat:
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


@pytest.fixture(scope="package")
def reference() -> Transformers:
    return Transformers()


@pytest.fixture(scope="package")
def expected(reference: Transformers) -> str:
    """What follows PROMPT."""
    return reference.complete(PROMPT)
