"""The LLMDeployment's types and the errors that bad objects get: path, value, rule and fix."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strata_operator.api import deployment_from_object, load_deployment
from strata_operator.errors import InvalidInputError
from tests.operator.builders import a_deployment
from tests.planner.question.test_cluster import ODD_YAML

SMALLEST = """
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec: {model: {uri: "hf://owner/name"}}
"""


def problems(data: object) -> tuple[str, ...]:
    with pytest.raises(InvalidInputError) as caught:
        deployment_from_object(data, "chat.yaml")
    return caught.value.problems


def refused(data: object) -> tuple[str, ...]:
    """The problems, or none when the object is accepted."""
    try:
        deployment_from_object(data)
    except InvalidInputError as error:
        return error.problems
    return ()


def test_the_smallest_object_gets_the_documented_defaults() -> None:
    spec = load_deployment(SMALLEST).spec
    assert (spec.workload.prompt_tokens, spec.workload.output_tokens, spec.workload.concurrency) == (512, 128, 32)
    assert spec.precision.allowed == (3, 4, 8, 16)
    assert (spec.placement.min_stages, spec.placement.max_stages) == (1, 64)
    assert spec.replanning.grace_period_seconds == 5


def test_an_object_of_the_api_server_is_read_with_what_it_adds() -> None:
    stored = a_deployment().to_object()
    stored["metadata"] |= {"managedFields": [{"manager": "kubectl"}], "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert deployment_from_object(stored).metadata.uid == stored["metadata"]["uid"]


def test_dumping_and_loading_gives_the_same_deployment() -> None:
    deployment = a_deployment().with_spec(placement={"minStages": 2}, model={"maxModelLen": 4096}).build()
    assert load_deployment(yaml.safe_dump(json.loads(deployment.model_dump_json(exclude_none=True)))) == deployment


def test_null_means_absent_as_for_the_api_server() -> None:
    assert load_deployment(SMALLEST + "status: null\n").status.committed_epoch == 0
    assert a_deployment().with_spec(workload={"promptTokens": None}).build().spec.workload.prompt_tokens == 512


SENTENCES = {
    "misspelt field": (
        {"workload": {"promptTokns": 4}},
        ["spec.workload.promptTokns: no such field; did you mean spec.workload.promptTokens?"],
    ),
    "snake case": (
        {"workload": {"prompt_tokens": 4}},
        ["spec.workload.prompt_tokens: no such field; did you mean spec.workload.promptTokens?"],
    ),
    "field of a later release": (
        {"objective": {"attainment": 0.99}},
        [
            "spec.objective.attainment: no such field; the fields here are goal, slo, qualityWeight, maxPerplexityIncrease"
        ],
    ),
    "a goal that one pipeline cannot have": (
        {"objective": {"goal": "latency"}, "planning": {"solver": "exact"}},
        [
            "spec.planning.solver: goals other than throughput and tensorParallel above 1 need planning.solver: auto or layout"
        ],
    ),
    "a goal without its figures": (
        {"objective": {"goal": "slo"}, "planning": {"solver": "layout"}},
        ['spec.objective: {"goal": "slo"}: the goal slo needs objective.slo and workload.requestsPerSecond'],
    ),
    "impossible objective": (
        {"objective": {"goal": "beauty"}},
        ["spec.objective.goal: \"beauty\" is not one of 'throughput', 'latency', 'slo' or 'cost'; use one of them"],
    ),
    "text for a number": (
        {"workload": {"concurrency": "many"}},
        ['spec.workload.concurrency: "many": should be a valid integer (Sequences in flight at once'],
    ),
    "below the least": (
        {"workload": {"outputTokens": 0}},
        ["spec.workload.outputTokens: 0: should be greater than or equal to 1 (Tokens of a typical answer)"],
    ),
    "a width no format has": (
        {"precision": {"allowed": [4, 2]}},
        ["spec.precision.allowed[1]: 2 is not one of 3, 4, 5"],
    ),
    "a width twice": ({"precision": {"allowed": [4, 4]}}, ["spec.precision.allowed: [4, 4]: lists a width twice"]),
    "s3": ({"model": {"uri": "s3://bucket/key"}}, ['spec.model.uri: "s3://bucket/key": s3:// and oci:// are not']),
    "no scheme": ({"model": {"uri": "owner/name"}}, ['spec.model.uri: "owner/name": must be hf://']),
    "upwards": ({"model": {"uri": "pvc://claim/../x"}}, ['spec.model.uri: "pvc://claim/../x": must not step upwards']),
    "a token nobody uses": (
        {"model": {"uri": "pvc://claim/m", "tokenSecretRef": {"name": "hf", "key": "token"}}},
        ["spec.model.tokenSecretRef: {"],
    ),
    "a cache nobody uses": (
        {"model": {"uri": "pvc://claim/m", "cache": {"persistentVolumeClaim": "c"}}},
        ["spec.model.cache: {"],
    ),
    "drafts of no model": (
        {"runtime": {"speculation": {"mode": "draft"}}},
        ["spec.runtime.speculation.draftModel: the mode draft needs a small model of the same tokenizer, eagle a head"],
    ),
    "a draft model nobody uses": (
        {"runtime": {"speculation": {"mode": "suffix", "draftModel": {"uri": "hf://owner/small"}}}},
        ["spec.runtime.speculation.draftModel: {"],
    ),
    "a draft model from nowhere": (
        {"runtime": {"speculation": {"mode": "draft", "draftModel": {"uri": "owner/small"}}}},
        ['spec.runtime.speculation.draftModel.uri: "owner/small": must be hf://'],
    ),
    "stages that cross": (
        {"placement": {"minStages": 3, "maxStages": 2}},
        ["spec.placement.minStages: 3: minStages is more than maxStages"],
    ),
    "longer than the context": (
        {"model": {"maxModelLen": 100}, "workload": {"promptTokens": 90, "outputTokens": 11}},
        ["spec.workload: {"],
    ),
    "toleration without key": (
        {"placement": {"tolerations": [{"value": "x"}]}},
        ["spec.placement.tolerations[0].key: operator Equal needs a key"],
    ),
    "a page for an origin": (
        {"gateway": {"allowedOrigins": ["https://a.example", "https://a.example/chat"]}},
        [
            'spec.gateway.allowedOrigins: ["https://a.example", "https://a.example/chat"]: has what is no origin of a web'
        ],
    ),
    "infinite": ({"objective": {"qualityWeight": float("inf")}}, ["spec.objective.qualityWeight: Infinity: should be"]),
    "several at once": (
        {"workload": {"promptTokens": 0, "concurrency": 0}},
        ["spec.workload.promptTokens: 0:", "spec.workload.concurrency: 0:"],
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_bad_spec(name: str) -> None:
    changes, beginnings = SENTENCES[name]
    found = problems(a_deployment().with_spec(**changes).to_object())
    assert len(found) == len(beginnings)
    for sentence, beginning in zip(found, beginnings, strict=True):
        assert sentence.startswith(beginning)


TEXTS = {
    "empty": ("", "holds 0 objects where one LLMDeployment is expected"),
    "two objects": (f"{SMALLEST}---{SMALLEST}", "holds 2 objects"),
    "a list": ("[]", "is [] where an object is expected"),
    "not YAML": ("a: [", "not valid YAML"),
    "a key twice": (SMALLEST + "kind: LLMDeployment\n", "the field 'kind' is given twice; keep one"),
    "no model": (
        SMALLEST.replace('{model: {uri: "hf://owner/name"}}', "{}"),
        "spec.model: is required; add it (The model",
    ),
    "no spec": ("apiVersion: strata.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: a}", "spec: is required"),
    "another kind": (SMALLEST.replace("LLMDeployment", "Deployment"), 'kind: "Deployment" is not one of'),
    "another version": (SMALLEST.replace("v1alpha1", "v9"), 'apiVersion: "strata.dev/v9" is not one of'),
    "a name that makes no host": (
        SMALLEST.replace("chat", "My_Chat"),
        'metadata.name: "My_Chat": should match pattern',
    ),
    "a name too long": (SMALLEST.replace("chat", "c" * 41), "should have at most 40 characters"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text(name: str) -> None:
    text, expected = TEXTS[name]
    with pytest.raises(InvalidInputError, match=r"^chat\.yaml: not accepted") as caught:
        load_deployment(text, "chat.yaml")
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ODD_YAML.values(), ids=ODD_YAML)
def test_odd_yaml_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        load_deployment(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from(sorted(a_deployment().to_object()["spec"])) | st.text(), value=json_values)
def test_any_value_is_accepted_or_refused_with_sentences(field: str, value: object) -> None:
    data = a_deployment().to_object()
    data["spec"][field] = value
    found = refused(data)
    assert all(sentence.startswith(("spec", "holds")) for sentence in found)


@given(bits=st.lists(st.sampled_from([2, 3, 9, 16, "ä"]), min_size=1, max_size=4, unique=True))
def test_wrong_items_of_a_list_are_named_once_each_as_they_were_written(bits: list[int | str]) -> None:
    deployment = a_deployment().with_spec(precision={"allowed": bits}).to_object()
    wrong = [(number, json.dumps(each, ensure_ascii=False)) for number, each in enumerate(bits) if each not in {3, 16}]
    said = [sentence.partition(" is not one of")[0] for sentence in refused(deployment)]
    assert said == [f"spec.precision.allowed[{number}]: {written}" for number, written in wrong]


def test_an_object_that_holds_itself_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a value that JSON cannot carry"):
        load_deployment("spec: &a {b: *a}")
