"""What pods ask a node for: the effective request of a pod, and quantities as Kubernetes writes them."""

import pytest

from strata_operator.errors import InvalidInputError
from strata_operator.render.requests import parse_quantity, pod_requests
from tests.operator.builders import a_pod

POD_REQUESTS = {
    "containers together": (a_pod().requesting(cpu="1"), "1"),
    "a larger init container": (a_pod().requesting(cpu="1").with_init_container(cpu="3"), "3"),
    "a smaller init container": (a_pod().requesting(cpu="2").with_init_container(cpu="1"), "2"),
    "a sidecar beside": (a_pod().requesting(cpu="2").with_init_container(sidecar=True, cpu="1"), "3"),
    "an init container after a sidecar": (
        a_pod().requesting(cpu="1").with_init_container(sidecar=True, cpu="1").with_init_container(cpu="4"),
        "5",
    ),
    "an init container before a sidecar": (
        a_pod().requesting(cpu="1").with_init_container(cpu="4").with_init_container(sidecar=True, cpu="1"),
        "4",
    ),
    "overhead": (a_pod().requesting(cpu="1").with_overhead(cpu="250m"), "1.25"),
}


@pytest.mark.parametrize("name", POD_REQUESTS)
def test_pod_requests(name: str) -> None:
    pod, expected = POD_REQUESTS[name]
    assert pod_requests(pod.build())["cpu"] == parse_quantity(expected)


QUANTITIES = {"100m": 0.1, "1Gi": 2**30, "1e3": 1000, "1E3": 1000, "1E": 10**18, "1.5k": 1500, "2": 2, ".5": 0.5}


@pytest.mark.parametrize("text", QUANTITIES)
def test_quantities(text: str) -> None:
    assert float(parse_quantity(text)) == QUANTITIES[text]


@pytest.mark.parametrize("text", ["", "abc", "1Zi", "Gi", "inf", "1 Gi"])
def test_malformed_quantities(text: str) -> None:
    with pytest.raises(InvalidInputError, match="write it as in"):
        parse_quantity(text)
