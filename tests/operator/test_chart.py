"""The chart: what Helm makes of it, as data. Needs the helm binary (scripts/build-cluster-tools helm), else is skipped."""

import copy
import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from strata_operator import crds
from strata_operator.api.pod import closed_rule
from strata_operator.api.tenants import TenantRules
from strata_operator.cli import app
from strata_operator.observe.inventory import InventoryOptions
from strata_operator.observe.source import SHARED, followed_in
from strata_operator.render import RenderOptions, names, render
from strata_planner.question.catalogue import catalogue
from tests.cluster.testbed import tools
from tests.operator.builders import a_deployment

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/strata"


def helm_path() -> str | None:
    """The binary of the test cluster's tools, else whatever is installed."""
    built = tools.expected_path(tools.named("helm"))
    return str(built) if built.exists() else shutil.which("helm")


HELM = helm_path()
pytestmark = [
    pytest.mark.slow,  # `make check` runs them
    pytest.mark.skipif(HELM is None, reason="helm is not built; run scripts/build-cluster-tools helm"),
]


def helm(*arguments: str, values: str = "{}") -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *arguments, "--namespace", "strata-system", "--values", "-"]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=60)


@functools.cache
def rendered(values: str) -> tuple[dict[str, Any], ...]:
    """The chart's objects with these values (JSON)."""
    made = helm("template", "strata", str(CHART), values=values)
    assert made.returncode == 0, made.stderr
    return tuple(each for each in yaml.safe_load_all(made.stdout) if each)


def of_kind(kind: str, **values: Any) -> list[dict[str, Any]]:
    return copy.deepcopy([each for each in rendered(json.dumps(values)) if each["kind"] == kind])


def operator_pod(**values: Any) -> dict[str, Any]:
    (deployment,) = of_kind("Deployment", **values)
    return dict(deployment["spec"]["template"]["spec"])


def test_lint() -> None:
    linted = helm("lint", "--strict", str(CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr


WRONG_VALUES = {
    "an unknown value": {"replicaCount": 2},
    "an unknown value below": {"image": {"repository": "x", "name": "y"}},
    "a port of root's": {"ports": {"metrics": 80}},
    "text for a number": {"replicas": "two"},
    "an impossible namespace": {"watchNamespaces": ["A_B"]},
    "an unknown rule for tenants": {"tenants": {"hostPath": True}},
    "an unknown log level": {"logLevel": "LOUD"},
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(name: str) -> None:
    made = helm("template", "strata", str(CHART), values=json.dumps(WRONG_VALUES[name]))
    assert made.returncode != 0
    assert "values don't meet the specifications of the schema" in made.stderr


def test_every_value_is_described_by_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert values.keys() | {"global"} == schema["properties"].keys()


def test_the_operator_keeps_the_restricted_profile() -> None:
    pod = operator_pod()
    (box,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= box.keys()


def test_the_operator_leaves_a_lost_node_after_five_seconds() -> None:
    limits = {each["key"]: each["tolerationSeconds"] for each in operator_pod()["tolerations"]}
    assert limits == {"node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 5}


def test_the_operator_is_told_its_ports_namespaces_and_image() -> None:
    (box,) = operator_pod(watchNamespaces=["a", "b"], runtimeImage={"repository": "r", "tag": "t"})["containers"]
    assert box["command"] == ["strata", "operator"]
    assert {"--health-port=8081", "--metrics-port=8080", "--namespace=a", "--namespace=b"} <= set(box["args"])
    environment = {each["name"]: each.get("value") for each in box["env"]}
    assert environment["STRATA_RUNTIME_IMAGE"] == "r:t"
    assert "POD_NAMESPACE" in environment


def test_the_operators_arguments_are_those_of_its_command_line() -> None:
    shown = (
        CliRunner().invoke(app, ["operator", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).output
    )
    (box,) = operator_pod(watchNamespaces=["a"], inventory={"links": {}})["containers"]
    for argument in box["args"]:
        assert argument.partition("=")[0] in shown


def test_what_a_user_adds_reaches_the_pod() -> None:
    pod = operator_pod(
        volumes=[{"name": "v", "emptyDir": {}}],
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
        env=[{"name": "A", "value": "b"}],
        nodeSelector={"pool": "system"},
        tolerations=[{"operator": "Exists"}],
        command=["python"],
    )
    assert {"name": "v", "emptyDir": {}} in pod["volumes"]
    assert {"name": "v", "mountPath": "/v"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "A", "value": "b"} in pod["containers"][0]["env"]
    assert pod["nodeSelector"] == {"pool": "system"}
    assert {"operator": "Exists"} in pod["tolerations"]
    assert pod["containers"][0]["command"] == ["python"]


def test_what_the_administrator_knows_reaches_the_inventory() -> None:
    profile = msgspec.to_builtins(catalogue().profile("T4")) | {"type": "Quadro-9000"}
    inventory = {"profiles": {"Quadro-9000": profile}, "links": {"betweenZones": {"gbps": 25.0}}}
    (made,) = of_kind("ConfigMap", inventory=inventory)
    options = InventoryOptions.from_yaml(made["data"]["inventory.yaml"], "inventory.yaml")
    assert options.profiles["Quadro-9000"].memory_bytes == profile["memoryBytes"]
    assert options.links.between_zones.gbps == 25
    pod = operator_pod(inventory=inventory)
    assert "--inventory=/etc/strata/inventory.yaml" in pod["containers"][0]["args"]
    assert {"name": "inventory", "configMap": {"name": made["metadata"]["name"]}} in pod["volumes"]


def test_the_definition_is_installed_and_kept() -> None:
    (definition,) = of_kind("CustomResourceDefinition")
    assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert definition == crds.crd()
    assert "annotations" not in of_kind("CustomResourceDefinition", crds={"keep": False})[0]["metadata"]
    assert of_kind("CustomResourceDefinition", crds={"install": False}) == []


def grants(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_no_role_grants_everything_or_touches_finalizers() -> None:
    for role in of_kind("ClusterRole") + of_kind("Role"):
        for group, resource, verb in grants(role):
            assert "*" not in {group, resource, verb}
            assert not resource.endswith("/finalizers")
            assert (resource, verb) != ("llmdeployments", "delete")


API_OF_KIND = {
    "ServiceAccount": ("", "serviceaccounts"),
    "Secret": ("", "secrets"),
    "Service": ("", "services"),
    "ConfigMap": ("", "configmaps"),
    "StatefulSet": ("apps", "statefulsets"),
    "Deployment": ("apps", "deployments"),
    "NetworkPolicy": ("networking.k8s.io", "networkpolicies"),
    "PodDisruptionBudget": ("policy", "poddisruptionbudgets"),
}


def test_the_operator_may_apply_whatever_is_rendered() -> None:
    (role,) = [role for role in of_kind("Role") if not role["metadata"]["name"].endswith("-lease")]
    options = RenderOptions(image="i", control_key="k", operator_namespace="n")
    kinds = {each["kind"] for each in render(a_deployment().build(), (), options)} | {"StatefulSet", "ConfigMap"}
    for kind in kinds:
        group, resource = API_OF_KIND[kind]
        for verb in ("get", "create", "delete") if kind == "Secret" else ("get", "create", "patch", "delete"):
            assert (group, resource, verb) in grants(role)


def test_what_is_followed_may_be_listed_and_watched() -> None:
    (everywhere,) = of_kind("ClusterRole")
    role = next(role for role in of_kind("Role") if ("apps", "statefulsets", "patch") in grants(role))
    for followed, where in [(each, everywhere) for each in SHARED] + [(each, role) for each in followed_in("a")]:
        group, _, _ = followed.kind.group_version.rpartition("/")
        for verb in ("list", "watch"):
            assert (group, followed.kind.plural, verb) in grants(where)


@pytest.mark.parametrize("served", [[], ["a", "b"]], ids=["by default", "named"])
def test_served_namespaces_limit_what_may_be_written_and_which_secrets_are_read(served: list[str]) -> None:
    values = {"watchNamespaces": served}
    namespaces = set(served or ["strata-system"])
    (everywhere,) = of_kind("ClusterRole", **values)
    assert {verb for _, _, verb in grants(everywhere)} == {"get", "list", "watch"}
    assert {resource for _, resource, _ in grants(everywhere)} == {
        "nodes",
        "pods",
        "namespaces",
        "customresourcedefinitions",
    }
    writing = [role for role in of_kind("Role", **values) if ("apps", "statefulsets", "patch") in grants(role)]
    assert {role["metadata"]["namespace"] for role in writing} == namespaces
    assert {each["metadata"]["namespace"] for each in of_kind("RoleBinding", **values)} == namespaces | {
        "strata-system"
    }
    (box,) = operator_pod(**values)["containers"]
    assert {each for each in box["args"] if each.startswith("--namespace=")} == {f"--namespace={n}" for n in namespaces}


def test_all_namespaces_are_served_where_that_is_asked_for() -> None:
    (everywhere,) = of_kind("ClusterRole", clusterScope=True)
    assert ("", "secrets", "create") in grants(everywhere)
    assert [role["metadata"]["name"] for role in of_kind("Role", clusterScope=True)] == ["strata-lease"]
    (box,) = operator_pod(clusterScope=True)["containers"]
    assert not [each for each in box["args"] if each.startswith("--namespace=")]
    both = helm("template", "strata", str(CHART), values='{"clusterScope": true, "watchNamespaces": ["a"]}')
    assert both.returncode != 0
    assert "leave watchNamespaces empty" in both.stderr


@pytest.mark.parametrize("scope", [{}, {"clusterScope": True}, {"watchNamespaces": ["a"]}], ids=str)
def test_no_role_may_change_a_secret(scope: dict[str, Any]) -> None:
    for role in of_kind("ClusterRole", **scope) + of_kind("Role", **scope):
        verbs = {verb for _, resource, verb in grants(role) if resource == "secrets"}
        assert not verbs & {"patch", "update"}


def test_what_tenants_may_use_reaches_the_operator_and_opens_the_definitions_rules() -> None:
    allowed = {"volumes": ["hostPath"], "secrets": ["team-*"], "images": ["example.org/team"]}
    (box,) = operator_pod(tenants=allowed)["containers"]
    (told,) = [each.partition("=")[2] for each in box["args"] if each.startswith("--tenants=")]
    rules = TenantRules.parse(told)
    assert msgspec.to_builtins(rules) == {"envSources": (), "referencedSecrets": ("*",)} | {
        name: tuple(each) for name, each in allowed.items()
    }
    (strict,), (opened,) = (of_kind("CustomResourceDefinition", **values) for values in ({}, {"tenants": allowed}))
    before, after = (json.dumps(each) for each in (strict, opened))
    for kind in ("hostPath", "secret", "secretKeyRef"):
        assert closed_rule(kind) in before
        before = before.replace(f'"{closed_rule(kind)}"', '"true"')
    assert before == after


def test_policies_of_deployments_let_these_pods_in() -> None:
    (deployment,) = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels[names.NAME_LABEL] == names.APP
    assert labels[names.COMPONENT_LABEL] == names.OPERATOR


def test_monitors_and_policy_are_behind_flags() -> None:
    assert of_kind("ServiceMonitor") == of_kind("NetworkPolicy") == []
    assert len(of_kind("ServiceMonitor", serviceMonitor={"enabled": True})) == 2
    (policy,) = of_kind("NetworkPolicy", networkPolicy={"enabled": True})
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert {443, 6443, 10250, 53, names.CONTROL_PORT} == ports


@pytest.mark.parametrize("image", ["operator", "runtime"])
def test_every_image_that_the_chart_names_has_a_dockerfile(image: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    named = {values["image"]["repository"], values["runtimeImage"]["repository"]}
    text = (ROOT / f"docker/{image}.Dockerfile").read_text(encoding="utf-8")
    assert f"strata-{image}" in named
    assert f"-t strata-{image}:" in text
    assert "USER 65532:65532" in text
