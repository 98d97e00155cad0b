"""What an LLMDeployment may put into its pods, and what the chart's value `tenants` adds: refused by path, with the fix."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_operator import crds
from strata_operator.api.pod import CLOSED_VOLUME_KINDS, VOLUME_KINDS, closed_rule
from strata_operator.api.tenants import TenantRules, repository_of
from strata_operator.errors import InvalidInputError
from tests.operator.builders import a_deployment

OURS = "registry.example.org:5000/strata/runtime:1@sha256:abc"


def problems(rules: TenantRules | None = None, **spec: Any) -> tuple[str, ...]:
    try:
        (rules or TenantRules()).check(a_deployment("chat").with_spec(**spec).build(), OURS)
    except InvalidInputError as error:
        return error.problems
    return ()


def with_volume(**volume: Any) -> dict[str, Any]:
    return {"runtime": {"pod": {"volumes": [{"name": "v", **volume}]}}}


def with_source(**source: Any) -> dict[str, Any]:
    return {"runtime": {"pod": {"env": [{"name": "A", "valueFrom": source}]}}}


def projected(**source: Any) -> dict[str, Any]:
    return with_volume(projected={"sources": [source]})


ALLOWED = {
    "nothing": {},
    "a claim": with_volume(persistentVolumeClaim={"claimName": "models"}),
    "scratch": with_volume(emptyDir={}),
    "a ConfigMap in a variable": with_source(configMapKeyRef={"name": "a", "key": "b"}),
    "the pod's own fields": with_source(fieldRef={"fieldPath": "metadata.name"}),
    "a projected ConfigMap": projected(configMap={"name": "a"}),
    "a token of the hub": {"model": {"tokenSecretRef": {"name": "hf", "key": "token"}}},
    "another tag of the runtime image": {"runtime": {"image": "registry.example.org:5000/strata/runtime:2"}},
}
REFUSED = {
    "the node's files": (with_volume(hostPath={"path": "/"}), {"volumes": ("hostPath",)}),
    "a driver": (with_volume(csi={"driver": "x"}), {"volumes": ("csi",)}),
    "a kind that comes later": (with_volume(quantumDisk={}), {"volumes": ("quantumDisk",)}),
    "a Secret as a volume": (with_volume(secret={"secretName": "team-a"}), {"secrets": ("team-*",)}),
    "a Secret in a variable": (with_source(secretKeyRef={"name": "team-a", "key": "b"}), {"secrets": ("team-*",)}),
    "a file of a container in a variable": (with_source(fileKeyRef={"path": "x"}), {"env_sources": ("fileKeyRef",)}),
    "a projected Secret": (projected(secret={"name": "team-a"}), {"secrets": ("team-*",)}),
    "a token of an account": (projected(serviceAccountToken={"path": "t"}), {"volumes": ("serviceAccountToken",)}),
    "another image": ({"runtime": {"image": "example.org/team/x:1"}}, {"images": ("example.org/team",)}),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_defaults_allow(name: str) -> None:
    assert problems(**ALLOWED[name]) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_the_defaults_refuse_and_the_value_that_is_named_allows(name: str) -> None:
    spec, opened = REFUSED[name]
    (sentence,) = problems(**spec)
    assert sentence.startswith("spec.runtime.")
    assert f"tenants.{next(iter(opened)).replace('env_s', 'envS')}" in sentence
    assert problems(TenantRules(**opened), **spec) == ()


@pytest.mark.parametrize("name", ["chat-control", "other-epoch-12"])
def test_stratas_own_secrets_are_never_read_by_pods(name: str) -> None:
    everything = TenantRules(secrets=("*",), referenced_secrets=("*",))
    reference = {"name": name, "key": "key"}
    for spec in (
        with_source(secretKeyRef=reference),
        with_volume(secret={"secretName": name}),
        projected(secret={"name": name}),
        {"model": {"tokenSecretRef": reference}},
        {"gateway": {"apiKeysSecretRef": reference}},
    ):
        (sentence,) = problems(everything, **spec)
        assert "Strata's own keys" in sentence


def test_secrets_that_fields_name_can_be_limited() -> None:
    rules = TenantRules(referenced_secrets=("hf-*",))
    (sentence,) = problems(rules, model={"tokenSecretRef": {"name": "db-password", "key": "key"}})
    assert "tenants.referencedSecrets" in sentence
    assert problems(rules, model={"tokenSecretRef": {"name": "hf-token", "key": "key"}}) == ()


def test_an_annotation_that_loosens_the_security_profile_is_refused() -> None:
    note = "container.apparmor.security.beta.kubernetes.io/slot"
    (sentence,) = problems(runtime={"pod": {"annotations": {note: "unconfined", "team": "a"}}})
    assert note in sentence


def test_all_problems_are_told_at_once() -> None:
    both = {"volumes": [{"name": "a", "hostPath": {}}, {"name": "b", "nfs": {}}]}
    assert len(problems(runtime={"pod": both, "image": "x"})) == 3


WORDS = st.text("abc", min_size=1, max_size=3)
REPOSITORIES = st.lists(WORDS, min_size=1, max_size=3).map("/".join)


@given(allowed=REPOSITORIES, more=REPOSITORIES, tag=st.sampled_from(["", ":1", "@sha256:0", ":1@sha256:0"]))
def test_an_allowed_repository_allows_what_lies_below_it_and_no_longer_word(allowed: str, more: str, tag: str) -> None:
    rules = TenantRules(images=(f"host:5000/{allowed}",))
    assert repository_of(f"host:5000/{allowed}{tag}") == f"host:5000/{allowed}"
    for image in (f"host:5000/{allowed}{tag}", f"host:5000/{allowed}/{more}{tag}"):
        assert problems(rules, runtime={"image": image}) == ()
    assert problems(rules, runtime={"image": f"host:5000/{allowed}{more}{tag}"})


def test_the_api_server_refuses_by_rules_what_no_default_allows() -> None:
    pod = crds.structural_schema()["properties"]["spec"]["properties"]["runtime"]["properties"]["pod"]["properties"]
    volume = pod["volumes"]["items"]
    assert not set(VOLUME_KINDS) & set(CLOSED_VOLUME_KINDS)
    assert [rule["rule"] for rule in volume["x-kubernetes-validations"]] == [*map(closed_rule, CLOSED_VOLUME_KINDS)]
    assert volume["properties"].keys() == set(CLOSED_VOLUME_KINDS)  # CEL sees declared fields alone
    source = pod["env"]["items"]["properties"]["valueFrom"]
    assert closed_rule("secretKeyRef") in [rule["rule"] for rule in source["x-kubernetes-validations"]]


def test_rules_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="tenants"):
        TenantRules.parse('{"volume": ["hostPath"]}')
