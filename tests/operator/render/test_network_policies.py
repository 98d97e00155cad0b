"""Connections between pods, as the documentation lists them, against the rendered NetworkPolicies."""

import re
from pathlib import Path
from typing import Any

import pytest

from strata_operator.api import LLMDeployment
from strata_operator.render import RenderOptions, names, render
from strata_operator.render.slots import Slot
from strata_planner.question.cluster import Device
from tests.operator.builders import a_deployment

ROOT = Path(__file__).parents[3]
OPTIONS = RenderOptions(image="strata-runtime:1", control_key="secret", operator_namespace="strata-system")
SLOTS = (
    Slot("chat-a-tesla-t4", "gpu-a.example", Device(type="Tesla-T4", count=2, memory_bytes=15 << 30)),
    Slot("chat-b-cpu", "b", Device(type="cpu", memory_bytes=3 << 30, threads=2)),
)
OPERATOR_LABELS = {names.NAME_LABEL: names.APP, names.COMPONENT_LABEL: names.OPERATOR}


def connections() -> list[tuple[str, str, int]]:
    """Rows of the table in docs/structure.md: who connects, to whom, at which (first) port."""
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8").split("## Connections")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (?:[a-z]+ )?(\d+)[^|]* \|", text, flags=re.MULTILINE)
    return [(source.strip(), target.strip(), int(port)) for source, target, port in rows]


ROLES = {
    "operator or supervisor": "operator",
    "client": "client",
    "slot": "slot",
    "next slot": "slot",
    "leader": "slot",
    "gateway": "gateway",
    "each other gateway": "gateway",
}


def policies_of(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [each for each in render(deployment, SLOTS, OPTIONS) if each["kind"] == "NetworkPolicy"]


def party(name: str, deployment: LLMDeployment) -> tuple[str, dict[str, str]]:
    """Namespace and labels of a pod in some part of a connection."""
    role = ROLES[name]
    if role == "operator":
        return OPTIONS.operator_namespace, OPERATOR_LABELS
    if role == "client":
        return "somewhere", {}
    return deployment.namespace, names.labels(deployment, role)


def allows(
    policies: list[dict[str, Any]], source: tuple[str, dict[str, str]], target: tuple[str, dict[str, str]], port: int
) -> bool:
    """Both ends must allow it; an end that no policy of ours selects is open (it is not ours to close)."""
    return one_way(policies, "ingress", target, source, port) and one_way(policies, "egress", source, target, port)


def one_way(
    policies: list[dict[str, Any]],
    direction: str,
    own: tuple[str, dict[str, str]],
    peer: tuple[str, dict[str, str]],
    port: int,
) -> bool:
    chosen = [
        each
        for each in policies
        if each["metadata"]["namespace"] == own[0]
        and each["spec"]["podSelector"]["matchLabels"].items() <= own[1].items()
    ]
    rules = [rule for each in chosen for rule in each["spec"][direction]]
    side = "from" if direction == "ingress" else "to"
    return not chosen or any(peer_matches(rule.get(side), own[0], peer) and port_matches(rule, port) for rule in rules)


def peer_matches(peers: list[dict[str, Any]] | None, namespace: str, pod: tuple[str, dict[str, str]]) -> bool:
    if peers is None:
        return True
    for peer in peers:
        wanted = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", namespace)
        if wanted == pod[0] and peer["podSelector"]["matchLabels"].items() <= pod[1].items():
            return True
    return False


def port_matches(rule: dict[str, Any], port: int) -> bool:
    return any(
        each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"] if each["protocol"] == "TCP"
    )


def test_the_documentation_lists_connections() -> None:
    assert len(connections()) >= 5


@pytest.mark.parametrize("row", connections(), ids=lambda row: f"{row[0]} to {row[1]}")
def test_every_documented_connection_is_allowed(row: tuple[str, str, int]) -> None:
    deployment = a_deployment().with_spec(replanning={"takeover": {"standingOrders": {}}}).build()
    policies = policies_of(deployment)
    source, target, port = row
    ports = {port, port + names.MOST_ROLES - 1} if port in {names.DATA_PORT, names.REQUEST_PORT} else {port}
    for each in ports:
        assert allows(policies, party(source, deployment), party(target, deployment), each)


FORBIDDEN = {
    "a client at a slot": ("client", "slot", 7171),
    "a client at the gateway's control port": ("client", "gateway", 7070),
    "a slot at another's control port": ("slot", "slot", 7070),
    "a slot at the gateway": ("slot", "gateway", 7070),
    "the gateway at a data port": ("gateway", "slot", 7071),
    "the gateway at a slot's control port, without standing orders": ("gateway", "slot", 7070),
    "the operator at a data port": ("operator or supervisor", "slot", 7071),
    "a slot at the API server": ("slot", "client", 6443),
    "a slot at anything on the web": ("slot", "client", 443),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_not_documented_is_forbidden(name: str) -> None:
    source, target, port = FORBIDDEN[name]
    deployment = a_deployment().with_spec(model={"uri": "pvc://models/llama/8b"}).build()
    policies = policies_of(deployment)
    assert not allows(policies, party(source, deployment), party(target, deployment), port)


def test_slots_of_another_deployment_are_strangers() -> None:
    deployment, other = a_deployment().build(), a_deployment("other").build()
    policies = policies_of(deployment)
    assert not allows(policies, party("slot", other), party("slot", deployment), 7071)
