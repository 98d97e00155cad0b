"""Every field of the spec that planning consumes reaches the planner's question."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata_operator.act.planner_call import Question, answer_to
from strata_operator.decide.planning import request_for, with_draft_model, with_margin
from strata_operator.render.slots import device_requests, slots_of
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.errors import ModelError, WorkloadError
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import swept
from tests.operator.builders import a_deployment

CONFIG = json.loads((Path(__file__).parents[3] / "examples/models/strata-tiny/config.json").read_text(encoding="utf-8"))
CLUSTER = Cluster.from_yaml("nodes: [{name: a, devices: [{type: cpu, count: 2, memoryBytes: 900000000}]}]")

REACHES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "promptTokens": ({"workload": {"promptTokens": 40}}, "workload.prompt_tokens", 40),
    "outputTokens": ({"workload": {"outputTokens": 30}}, "workload.output_tokens", 30),
    "concurrency": ({"workload": {"concurrency": 5}}, "workload.concurrency", 5),
    "promptTokensDeviation": ({"workload": {"promptTokensDeviation": 20}}, "workload.prompt_deviation", 20.0),
    "outputTokensDeviation": ({"workload": {"outputTokensDeviation": 9}}, "workload.output_deviation", 9.0),
    "maxModelLen": ({"model": {"uri": "hf://a/b", "maxModelLen": 200}}, "max_model_len", 200),
    "qualityWeight": ({"objective": {"qualityWeight": 7.0}}, "theta", 7.0),
    "allowed": ({"precision": {"allowed": [4, 16]}}, "allowed_bits", (4, 16)),
    "method": ({"precision": {"method": "float8", "allowed": [8]}}, "formats", {8: ("fp8_e4m3",)}),
    "activationBits": ({"precision": {"allowed": [8], "activationBits": [8, 16]}}, "activation_bits", (8, 16)),
    "kvCacheBits": ({"precision": {"kvCacheBits": 8}}, "kv_bits", 8),
    "minStages": ({"placement": {"minStages": 2}}, "min_stages", 2),
    "maxStages": ({"placement": {"maxStages": 3}}, "max_stages", 3),
    "maxReplicas": ({"placement": {"maxReplicas": 2}}, "max_replicas", 2),
    "goal": ({"objective": {"goal": "latency"}}, "objective.goal", "latency"),
    "solver": ({"planning": {"solver": "transfer"}}, "solver", "transfer"),
    "timeLimitSeconds": ({"planning": {"timeLimitSeconds": 9}}, "time_limit_seconds", 9),
    "prefixCaching": ({"runtime": {"prefixCaching": False}}, "prefix_caching", False),
    "speculation": ({"runtime": {"speculation": {"mode": "auto"}}}, "speculation", Speculation("auto", 4)),
    "draftBits": (
        {"runtime": {"speculation": {"mode": "selfPrecision", "tokens": 6, "draftBits": 3}}},
        "speculation",
        Speculation("selfPrecision", 6, 3),
    ),
    "formats that draft": (
        {"precision": {"allowed": [8]}, "runtime": {"speculation": {"mode": "selfPrecision"}}},
        "formats",
        {8: ("any8",)},
    ),
    "computeType": ({"runtime": {"computeType": "float32"}}, "compute_type", "float32"),
}


@pytest.mark.parametrize("name", REACHES)
def test_a_field_reaches_the_planner(name: str) -> None:
    spec, place, expected = REACHES[name]
    short = {"workload": {"promptTokens": 64, "outputTokens": 32}}
    found: Any = request_for(a_deployment().with_spec(**short).with_spec(**spec).build(), CLUSTER, CONFIG)
    for part in place.split("."):
        found = getattr(found, part)
    assert found == expected


@pytest.mark.parametrize(
    ("precision", "devices", "expected"),
    [
        ({"allowed": [4, 8]}, ["cpu", "cpu"], "int8"),
        ({"allowed": [4, 16]}, ["cpu"], "dense"),
        ({"allowed": [4, 8]}, ["cpu", "Tesla-T4"], "dense"),
        ({"allowed": [4], "headBits": 16}, ["cpu"], "dense"),
        ({"allowed": [16], "headBits": 8}, ["Tesla-T4"], "int8"),
    ],
)
def test_the_head_is_rounded_where_that_is_wished_or_layers_are_on_processors(
    precision: dict[str, Any], devices: list[str], expected: str
) -> None:
    cluster = Cluster(nodes=(Node("a", tuple(Device(each, memory_bytes=8 << 30, threads=1) for each in devices)),))
    deployment = a_deployment().with_spec(precision=precision, runtime={"computeType": "float16"}).build()
    assert request_for(deployment, cluster, CONFIG).model.head_format == expected
    gptq = CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
    assert request_for(deployment, cluster, gptq).model.head_format == "dense"


def test_stages_of_several_devices_are_asked_for_in_formats_that_these_share() -> None:
    """Any precision, whose layers can move; experts have none."""
    cluster = Cluster(nodes=(Node("a", (Device("cpu", 2, memory_bytes=8 << 30, threads=1),)),))
    spec = {
        "placement": {"tensorParallel": [2]},
        "planning": {"solver": "layout"},
        "precision": {"allowed": [4, 8, 16], "activationBits": [8, 16]},
    }
    deployment = a_deployment().with_spec(**spec).build()
    assert request_for(deployment, cluster, CONFIG).formats == {16: ("dense",), 8: ("any8", "w8a8"), 4: ("any4",)}
    experts = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(UnsupportedModelError, match=r"groups of 4 bits are not cut .* heads are 16 wide"):
        request_for(deployment, cluster, experts | {"head_dim": 16})
    request = request_for(deployment, cluster, experts | {"head_dim": 32})
    assert request.formats == {16: ("dense",), 8: ("int8", "w8a8"), 4: ("int4",)}


def test_a_margin_is_left_free_of_every_device_beside_what_the_user_said() -> None:
    cluster = Cluster(
        nodes=(Node("a", (Device("cpu", memory_bytes=8 << 30, threads=1), Device("Tesla-T4", memory_bytes=8 << 30))),)
    )
    usable = [each.usable_bytes for each in cluster.accelerators()]
    deployment, less = with_margin(a_deployment().build(), cluster, 0.2)
    assert [each.usable_bytes < before for each, before in zip(less.accelerators(), usable, strict=True)] == [
        True,
        True,
    ]
    assert deployment == a_deployment().build()
    stated = a_deployment().with_spec(planning={"overrides": {"usableMemoryFraction": 0.5}}).build()
    deployment, _ = with_margin(stated, cluster, 0.2)
    assert deployment.spec.planning.overrides.usable_memory_fraction == pytest.approx(0.4)
    assert with_margin(stated, cluster, 0.0) == (stated, cluster)


@pytest.mark.slow  # planner/replan/test_decision.py keeps plans
def test_the_plan_in_force_is_kept_where_another_gains_less_than_min_gain(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = {
        "model": {"uri": f"file://{tmp_path}", "maxModelLen": 128},
        "workload": {"promptTokens": 32, "outputTokens": 32},
        "precision": {"allowed": [8, 16]},
    }
    deployment = a_deployment().with_spec(**spec).build()
    slow = Node("a", (Device("cpu", memory_bytes=2 << 30, threads=1),))
    fast = Node("b", (Device("Tesla-T4", memory_bytes=16 << 30),))
    thing = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"status"})

    def planned(nodes: tuple[Node, ...], running: Plan | None = None) -> Plan:
        plan = answer_to(Question(thing, Cluster(nodes=nodes), running=running)).plan
        assert plan is not None
        return plan

    running = planned((slow,))
    # Holds no replica, and as a stage is only one hop more.
    same = Node("c", (Device("cpu", memory_bytes=30 << 20, threads=1),))
    assert planned((slow, same), running) == running
    better = planned((slow, fast), running)
    assert {stage.node for stage in better.stages} == {"b"}


DRAFTING = {"runtime": {"speculation": {"mode": "draft", "tokens": 6, "draftModel": {"uri": "hf://a/small"}}}}


def test_a_draft_model_reaches_the_planner() -> None:
    short = {"workload": {"promptTokens": 64, "outputTokens": 32}}
    deployment = a_deployment().with_spec(**short).with_spec(**DRAFTING).build()
    request = request_for(deployment, CLUSTER, CONFIG)
    with pytest.raises(ModelError, match="speculation mode draft with the draft model ''"):
        request.check()
    small = CONFIG | {"num_hidden_layers": 1}
    found = with_draft_model(request, small, "hf://a/small@0123")
    found.check()
    assert found.speculation == Speculation("draft", 6, draft_uri="hf://a/small@0123")
    assert found.draft_model == Model.from_config(small)
    with pytest.raises(ModelError, match=r"draft model hf://a/other: it has 9999 tokens, .* the same tokenizer"):
        with_draft_model(request, CONFIG | {"vocab_size": 9999}, "hf://a/other").check()
    with pytest.raises(UnsupportedModelError, match=r"draft model hf://a/odd: .*no-such-model"):
        with_draft_model(request, CONFIG | {"model_type": "no-such-model"}, "hf://a/odd")


HEAD = {"draft_vocab_size": 256, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
EAGLE = {"runtime": {"speculation": {"mode": "eagle", "draftModel": {"uri": "hf://a/head"}}}}


@pytest.mark.parametrize("mode", ["eagle", "auto"])
def test_a_head_reaches_the_planner(mode: str) -> None:
    """With the layers that it reads, for stages to hand on."""
    short = {"workload": {"promptTokens": 64, "outputTokens": 32}}
    wish = EAGLE["runtime"]["speculation"] | {"mode": mode}
    deployment = a_deployment().with_spec(**short, runtime={"speculation": wish})
    request = request_for(deployment.build(), CLUSTER, CONFIG)
    found = with_draft_model(request, CONFIG | HEAD, "hf://a/head@0123")
    found.check()
    layers = Model.from_config(CONFIG).num_layers
    fused = tuple(sorted({1, layers // 2 - 1, layers - 4}))
    assert found.speculation == Speculation(mode, 4, draft_uri="hf://a/head@0123", fused=fused)  # type: ignore[arg-type]
    assert found.draft_model is not None
    assert (found.draft_model.num_layers, found.draft_model.vocab_size) == (1, 256)
    odd = {
        **({} if mode == "auto" else {"is that of no EAGLE-3 head": CONFIG}),
        "hidden states of 96 values": CONFIG | HEAD | {"target_hidden_size": 96},
        "it has 9999 tokens, the model": CONFIG | HEAD | {"vocab_size": 9999},
        "num_hidden_layers|it has 3 layers": CONFIG | HEAD | {"num_hidden_layers": 3},
    }
    for said, config in odd.items():
        with pytest.raises(UnsupportedModelError, match=f"draft model hf://a/odd: .*({said})"):
            with_draft_model(request, config, "hf://a/odd")
    small = request_for(a_deployment().with_spec(**short).with_spec(**DRAFTING).build(), CLUSTER, CONFIG)
    with pytest.raises(UnsupportedModelError, match="that is a head of EAGLE-3: take the mode eagle or auto"):
        with_draft_model(small, CONFIG | HEAD, "hf://a/head")


@pytest.mark.slow  # two searches
def test_the_operators_planner_reads_the_draft_model_where_the_plan_in_force_has_it(tmp_path: Path) -> None:
    """And says which of the two models is missing."""
    for name, layers in (("large", 4), ("small", 1), ("newer", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    speculation = {"mode": "draft", "draftModel": {"uri": f"file://{tmp_path}/newer"}}
    spec = {"model": {"uri": f"file://{tmp_path}/large", "maxModelLen": 128}, "runtime": {"speculation": speculation}}
    load = {"promptTokens": 32, "outputTokens": 32}
    deployment = a_deployment().with_spec(workload=load, precision={"allowed": [16]}, **spec).build()
    thing = deployment.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"status"})
    for asked, expected in (("", "newer"), (f"file://{tmp_path}/small", "small")):
        plan = answer_to(Question(thing, CLUSTER, draft_uri=asked)).plan
        assert plan is not None
        assert plan.speculation == Speculation("draft", 4, draft_uri=f"file://{tmp_path}/{expected}")
    answer = answer_to(Question(thing, CLUSTER, draft_uri=f"file://{tmp_path}/gone"))
    assert answer.reason == "InvalidInput"
    assert f"{tmp_path}/gone" in answer.message


LLAMA = CONFIG | {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WIDE = {"precision": {"allowed": [8, 16]}, "workload": {"promptTokens": 64, "outputTokens": 32, "concurrency": 4}}
PAIR = Node("a", (Device("cpu", count=2, memory_bytes=4 << 30, threads=2),))


def a_wide_request(*nodes: Node, config: dict[str, Any] | None = None, **spec: Any) -> PlanRequest:
    deployment = a_deployment().with_spec(model={"uri": "hf://a/b", "maxModelLen": 128}).with_spec(**WIDE)
    return request_for(deployment.with_spec(**spec).build(), Cluster(nodes=nodes or (PAIR,)), config or LLAMA)


ORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
# name -> (spec, nodes, config, degrees)
DEGREES: dict[str, tuple[dict[str, Any], tuple[Node, ...], dict[str, Any], tuple[int, ...]]] = {
    "two devices": ({}, (), LLAMA, (1, 2)),
    "five devices": ({}, (Node("a", (Device("cpu", 5, 1 << 30, 1),)),), LLAMA, (1, 2, 4, 5)),
    "the solver layout": ({"planning": {"solver": "layout"}}, (), LLAMA, (1, 2)),
    "any precision": ({"precision": {"allowed": [3, 4], "method": "anyPrecision"}}, (), LLAMA, (1, 2)),
    "named": ({"placement": {"tensorParallel": [1]}}, (), LLAMA, (1,)),
    "one device a node": ({}, tuple(Node(name, (Device("cpu", 1, 4 << 30, 2),)) for name in "ab"), LLAMA, (1,)),
    "a GPU": ({}, (PAIR, Node("b", (Device("Tesla-T4", 2, 16 << 30),))), LLAMA, (1,)),
    "one pipeline": ({"planning": {"solver": "pipeline"}}, (), LLAMA, (1,)),
    "groups of few bits": ({"precision": {"allowed": [4, 16]}}, (), LLAMA, (1, 2)),
    "groups that heads divide": ({"precision": {"allowed": [4, 16]}}, (), LLAMA | {"head_dim": 16}, (1,)),
    "a model that is not cut": ({}, (), LLAMA | {"quantization_config": ORDERED}, (1,)),
}


@pytest.mark.parametrize("name", DEGREES)
def test_stages_of_several_processors_are_looked_for_where_they_run(name: str) -> None:
    spec, nodes, config, degrees = DEGREES[name]
    assert a_wide_request(*nodes, config=config, **spec).tensor_parallel == degrees


GPUS = Node("g", (Device("Tesla-T4", 2, 16 << 30),))


def test_stages_of_several_gpus_are_planned_where_they_are_asked_for_and_one_slot_asks_for_all_of_them() -> None:
    request = a_wide_request(GPUS, placement={"tensorParallel": [2]})
    plan = make_plan(request).plan
    (stage,) = plan.stages
    assert (stage.tensor_parallel, [each.index for each in stage.devices]) == (2, [0, 1])
    (slot,) = slots_of(plan, request.cluster)
    assert device_requests(slot.device) == {"nvidia.com/gpu": "2"}


def test_a_node_of_unlike_gpus_forms_no_stage() -> None:
    unlike = Node("g", (Device("Tesla-T4", 2, 16 << 30), Device("L4", 2, 24 << 30)))
    with pytest.raises(
        WorkloadError, match=r"\[2\]: node g has L4 and Tesla-T4, and devices of a stage are of one type"
    ):
        a_wide_request(unlike, placement={"tensorParallel": [2]})
    assert a_wide_request(unlike, placement={"tensorParallel": [1]}).tensor_parallel == (1,)


def test_beside_a_head_that_drafts_no_stage_is_shared_unless_it_must_be() -> None:
    for wish, degrees in ((None, (1,)), ([1, 2], (1,)), ([2], (2,))):
        request = a_wide_request(config=CONFIG, placement={"tensorParallel": wish} if wish else {}, **EAGLE)
        assert 2 in request.tensor_parallel
        assert with_draft_model(request, CONFIG | HEAD, "hf://a/head").tensor_parallel == degrees


@pytest.mark.parametrize("goal", swept(["throughput", "latency"], ["throughput"]))
@pytest.mark.parametrize(("latency_ms", "degree"), [(0.05, 2), pytest.param(50.0, 1, marks=pytest.mark.slow)])
def test_the_plan_is_the_best_of_both_ways_and_says_what_the_other_is_worth(
    goal: str, latency_ms: float, degree: int
) -> None:
    """With and without groups, by the request's own metric, however quickly two devices hear of each other."""
    request = a_wide_request(objective={"goal": goal})
    link = LinkRate(gbps=100.0, latency_ms=latency_ms)
    request = replace(request, cluster=msgspec.structs.replace(request.cluster, intra_node=link))
    plan = with_alternatives(request, make_plan(request)).plan
    values = {
        degrees: value_of_plan(request, make_plan(replace(request, tensor_parallel=degrees)).plan)
        for degrees in ((1,), (2,))
    }
    assert value_of_plan(request, plan) == pytest.approx(max(values.values()), rel=1e-6)
    taken = {stage.tensor_parallel for stage in plan.stages}
    assert taken == {degree}
    said = "one device a stage" if taken == {2} else "2 devices a stage"
    assert said in {each.summary for each in plan.alternatives}
