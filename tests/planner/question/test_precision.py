"""Which format a device stores its bits in: the method's own, or one that rounds activations where the device is faster by it."""

from dataclasses import replace

import pytest

from benchmarks.reference.judge import assignment_of, judge
from strata_planner.contract.formats import ANY_PRECISION
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.errors import WorkloadError
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.precision import formats_on
from strata_planner.search.planning import make_plan
from strata_planner.sensitivity import Sensitivity
from tests.planner.builders import CARD, MIB, a_cluster, a_profile, a_request

EVERY_WIDTH = (3, 4, 5, 6, 7, 8, 16)


def unlike_cards(*w8a8_shares: float) -> Cluster:
    """Cards that differ in how fast their products of 8-bit activations are; int8 reaches 0.5 on all."""
    nodes = []
    for index, share in enumerate(w8a8_shares):
        shares = {"dense": 0.5, "int8": 0.5, "w8a8": share, "int4": 0.5, "int3": 0.5}
        profile = {"decodeEfficiency": shares, "prefillEfficiency": shares}
        nodes.append(
            Node(
                chr(ord("a") + index),
                (Device(CARD, memory_bytes=2 * MIB, usable_fraction=1.0, overhead_bytes=0, profile=profile),),
            )
        )
    return Cluster(tuple(nodes), default_link=LinkRate(gbps=10, latency_ms=0.1), profiles={CARD: a_profile(type=CARD)})


def test_each_device_takes_the_faster_of_two_formats_with_the_same_bits() -> None:
    cluster = unlike_cards(0.25, 1.0)
    request = a_request(cluster, allowed_bits=(8,), activation_bits=(8, 16), min_stages=2)
    chosen = [formats_on(request, DeviceGroup((device,)))[8] for device in cluster.accelerators()]
    assert chosen == ["int8", "w8a8"]
    stages = {stage.node: set(stage.format) for stage in make_plan(request).plan.stages}
    assert stages == {"a": {"int8"}, "b": {"w8a8"}}


def test_activations_keep_their_bits_unless_asked() -> None:
    request = a_request(unlike_cards(1.0), allowed_bits=(8,))
    assert formats_on(request, DeviceGroup((request.cluster.accelerators()[0],))) == {8: "int8"}


def test_any_precision_plans_with_every_width() -> None:
    request = a_request(a_cluster(64, 64), method="anyPrecision", allowed_bits=EVERY_WIDTH)
    (device, *_) = request.cluster.accelerators()
    stored = formats_on(request, DeviceGroup((device,)))
    assert stored == {16: "dense"} | ANY_PRECISION
    plan = make_plan(request).plan
    assert {name for stage in plan.stages for name in stage.format} <= {"dense", *ANY_PRECISION.values()}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"allowed_bits": (5, 16)}, r"roundToNearest has formats for \[3, 4, 8, 16\]; .* take the method anyPrecision"),
        ({"method": "magic"}, "method 'magic': choose from roundToNearest, anyPrecision, float8"),
        ({"activation_bits": (8,)}, r"activationBits \[8\]: choose \[16\] or \[8, 16\]"),
    ],
)
def test_what_no_format_does_is_refused(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        a_request(**changes).check()  # type: ignore[arg-type]


def test_a_width_between_two_calibrated_ones_is_told_geometrically() -> None:
    table = Sensitivity("measured", ({"4": 16.0, "8": 1.0}, {"4": 0.0, "8": 0.0})).completed((3, 6, 8))
    assert table.omega == ({"4": 16.0, "6": pytest.approx(4.0), "8": 1.0}, {"4": 0.0, "6": 0.0, "8": 0.0})


def a_gptq_model(layers: int = 4, **description: object) -> Model:
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    return Model.from_config({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500, "max_position_embeddings": 128,
        "quantization_config": fields | description,
    })  # fmt: skip


def test_a_quantized_checkpoint_is_planned_as_it_is_stored_or_at_16_bits() -> None:
    request = a_request(a_cluster(64, 64), model=a_gptq_model())
    assert request.formats == {4: ("gptq4",), 16: ("dense",)}
    plan = make_plan(replace(request, theta=0.0)).plan
    assert {name for stage in plan.stages for name in stage.format} <= {"gptq4", "dense"}
    assert plan.prediction.quality_penalty == 0
    assert a_request(model=a_gptq_model(), allowed_bits=(3, 8)).formats == {4: ("gptq4",)}


def test_groups_and_orders_of_a_checkpoint_count_byte_for_byte() -> None:
    plain, ordered = (a_gptq_model(group_size=64, desc_act=order).layers[0] for order in (False, True))
    inputs = sum(linear.in_features for linear in plain.linears)
    parts = [
        each.out_features * each.in_features // 2 + each.out_features * each.in_features // 64 * 3
        for each in plain.linears
    ]
    norms = 2 * 256 * 2
    assert layer_weights_bytes(plain, "gptq4", "bfloat16") == sum(parts) + norms
    assert layer_weights_bytes(ordered, "gptq4", "bfloat16") == sum(parts) + norms + 4 * inputs


def test_each_layer_keeps_the_bits_that_the_checkpoint_holds_it_in() -> None:
    dynamic = {r"+:.*\.layers\.1\..*": {"bits": 8}, r"-:.*\.layers\.2\..*": {}}
    request = a_request(a_cluster(64, 3.0), model=a_gptq_model(dynamic=dynamic), min_stages=2, allowed_bits=(4,))
    assert [request.layer_bits(layer) for layer in range(4)] == [(4, 16), (8, 16), (16,), (4, 16)]
    plan = make_plan(replace(request, solver="pipeline")).plan  # told as LLM-PQ tells it, as the judge does
    stored = [name for stage in plan.stages for name in stage.format]
    for name, own in zip(stored, ("gptq4", "gptq8", "dense", "gptq4"), strict=True):
        assert name in {own, "dense"}
    judged = judge(request, assignment_of(plan, request))
    assert judged.fits
    assert judged.latency_seconds == pytest.approx(plan.prediction.latency_seconds)


def test_calibrated_activations_are_taken_before_those_told_on_the_fly() -> None:
    request = a_request(unlike_cards(1.0), allowed_bits=(8,), activation_bits=(8, 16), static_activations=True)
    assert request.formats == {8: ("int8", "w8a8_static", "w8a8", "fp8_a8")}
    assert formats_on(request, DeviceGroup((request.cluster.accelerators()[0],)))[8] == "w8a8_static"
