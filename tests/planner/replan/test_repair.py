"""Repairs: within memory, every layer once, only what must change, bits and quality no further than allowed, the same whatever names are."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from strata_planner.contract.plan import Plan, Replica
from strata_planner.errors import InfeasibleError, OutOfTimeError, WorkloadError
from strata_planner.question.changes import priced
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Repair, Takeover, repair
from strata_planner.search.metric import gain, value_of_plan
from strata_planner.search.planning import make_plan
from strata_planner.sensitivity import Sensitivity, perplexity_increase_of
from strata_planner.sensitivity.fit import LossFit
from tests.laws import share, swept
from tests.planner.builders import CARD, a_cluster, a_model, a_request
from tests.planner.replan.test_decision import replayed

laws = settings(
    max_examples=share(40, 16),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # plans are searched for each example
)


def left(request: PlanRequest, lost: set[str]) -> PlanRequest:
    return replace(request, cluster=request.cluster.without(lost))


@st.composite
def losses(draw: st.DrawFn) -> tuple[Plan, PlanRequest, Takeover]:
    """A plan on three to six devices, and its question with one or two of those that it uses gone."""
    memory = draw(st.lists(st.sampled_from([1.5, 2.0, 3.0, 6.0]), min_size=3, max_size=4))
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in memory)
    changes: dict[str, Any] = {
        "theta": draw(st.sampled_from([0.0, 0.01, 1.0])),
        "solver": draw(st.sampled_from(["pipeline", "layout", "layout"])),
        "method": draw(st.sampled_from(["roundToNearest", "anyPrecision"])),
        "min_stages": draw(st.sampled_from([1, 3])),
        "sensitivity": draw(st.sampled_from([None, UNEVEN])),
    }
    request = a_request(a_cluster(*memory, speeds=speeds), time_limit_seconds=0.5, **changes)
    try:
        plan = make_plan(request, quick=True).plan
    except (InfeasibleError, OutOfTimeError):
        assume(condition=False)
    used = sorted({stage.node for stage in plan.stages})
    lost = set(draw(st.lists(st.sampled_from(used), min_size=1, max_size=2, unique=True)))
    assume(len(request.cluster.nodes) > len(lost))
    wishes = Takeover(draw(st.sampled_from([3, 4, 8])), exact=draw(st.booleans()))
    return plan, replace(left(request, lost), min_stages=1), wishes


UNEVEN = Sensitivity(
    "a table",
    tuple({"3": 9.0 + layer, "4": 4.0 + 3 * layer, "8": 0.5 + layer % 2, "16": 0.0} for layer in range(6)),
    LossFit(loss=2.0, curve="proportional", slope=0.01, exponent=1.0, knots=(), points=3, leave_one_out=0.1),
)


def found(request: PlanRequest, running: Plan, wishes: Takeover | None = None) -> Repair | str:
    """Or why there is none."""
    try:
        return repair(request, running, wishes)
    except InfeasibleError as error:
        return str(error)


@laws
@given(losses())
def test_a_repair_keeps_to_memory_layers_bits_and_what_need_not_change(
    loss: tuple[Plan, PlanRequest, Takeover],
) -> None:
    running, request, wishes = loss
    mended = found(request, running, wishes)
    assume(isinstance(mended, Repair))
    assert isinstance(mended, Repair)
    plan = mended.plan
    plan.check()
    check_devices(plan, request.cluster)
    check_bits(mended, running, wishes)
    check_whole(running, plan, set(mended.lost))
    if mended.kind == "neighbours":
        check_neighbours(running, plan)
    before, after = (msgspec.structs.replace(each, replicas=broken(running, mended, each)) for each in (running, plan))
    held = replayed(before, after, mended.steps, request, serving=False)
    for stage in after.stages:
        wanted = dict(zip(range(stage.layers[0], stage.layers[1] + 1), stage.format, strict=True))
        assert {layer: name for layer, name in held[stage.places].items() if layer is not None} == wanted
    assert mended.value == pytest.approx(value_of_plan(request, plan))
    kept = 1 + gain(mended.value, value_of_plan(request, running))  # which bounds what a fresh plan is better by
    assert mended.note.kept_share == pytest.approx(max(0, kept), abs=1e-4)
    again = repair(request, running, wishes)
    assert replace(again, seconds=0.0) == replace(mended, seconds=0.0)


def check_devices(plan: Plan, cluster: Cluster) -> None:
    usable = {device.place: device.usable_bytes for device in cluster.accelerators()}
    places = [place for stage in plan.stages for place in stage.places]
    assert len(places) == len(set(places))
    for stage in plan.stages:
        assert stage.memory.total_bytes <= min(usable[place] for place in stage.places)
    for replica in plan.replicas:
        pages = {stage.kv_page_budget for stage in replica.stages}
        assert len(pages) == 1
        assert [stage.embedding for stage in replica.stages] == [True] + [False] * (len(replica.stages) - 1)
        assert [stage.head for stage in replica.stages] == [False] * (len(replica.stages) - 1) + [True]


def bits_of(replica: Replica) -> list[int]:
    return [bits for stage in replica.stages for bits in stage.bits]


def check_bits(mended: Repair, running: Plan, wishes: Takeover) -> None:
    before = {replica.replica: bits_of(replica) for replica in running.replicas}
    told = {(each.replica, each.layer): (each.before, each.after) for each in mended.lowered}
    for replica in mended.plan.replicas:
        for layer, (was, now) in enumerate(zip(before[replica.replica], bits_of(replica), strict=True)):
            assert now >= (was if wishes.exact else min(was, wishes.min_bits))
            assert told.pop((replica.replica, layer), None) == ((was, now) if now < was else None)
    assert not told


def check_whole(running: Plan, plan: Plan, lost: set[Any]) -> None:
    for replica in running.replicas:
        if not lost & {place for stage in replica.stages for place in stage.places}:
            assert replica in plan.replicas


def check_neighbours(running: Plan, plan: Plan) -> None:
    """Of every replica that changed, stages that were not beside a lost one hold what they held."""
    for replica in plan.replicas:
        old = next(each for each in running.replicas if each.replica == replica.replica)
        kept = {stage.places: stage for stage in replica.stages}
        beside = [k for k, stage in enumerate(old.stages) if stage.places not in kept]
        near = {k for j in beside for k in reach_of(old, j, kept)}
        for k, stage in enumerate(old.stages):
            if stage.places in kept and k not in near:
                assert (kept[stage.places].layers, kept[stage.places].format) == (stage.layers, stage.format)


def reach_of(old: Replica, j: int, kept: dict[Any, Any]) -> set[int]:
    """The next survivors on either side of stage j."""
    before = next(({k} for k in range(j, -1, -1) if old.stages[k].places in kept), set[int]())
    behind = next(({k} for k in range(j, len(old.stages)) if old.stages[k].places in kept), set[int]())
    return before | behind


def broken(running: Plan, mended: Repair, plan: Plan) -> tuple[Replica, ...]:
    """The replicas of a plan that the loss was in."""
    numbers = {r.replica for r in running.replicas if any(set(s.places) & set(mended.lost) for s in r.stages)}
    return tuple(each for each in plan.replicas if each.replica in numbers)


@laws
@given(losses(), st.permutations("pqrstuv"))
def test_names_of_nodes_have_no_part_in_a_repair(loss: tuple[Plan, PlanRequest, Takeover], names: list[str]) -> None:
    running, request, wishes = loss
    new = dict(zip("abcdef", names, strict=False))

    def renamed(text: bytes) -> bytes:
        for old, name in new.items():
            text = text.replace(f'"node":"{old}"'.encode(), f'"node":"{name}"'.encode())
        return text

    nodes = tuple(msgspec.structs.replace(node, name=new[node.name]) for node in request.cluster.nodes)
    other = replace(request, cluster=msgspec.structs.replace(request.cluster, nodes=nodes))
    mine, theirs = found(request, running, wishes), found(other, Plan.decode(renamed(running.encode())), wishes)
    assert isinstance(mine, Repair) == isinstance(theirs, Repair)
    if isinstance(mine, Repair) and isinstance(theirs, Repair):
        assert (theirs.kind, theirs.lowered, theirs.movement) == (mine.kind, mine.lowered, mine.movement)
        for one, another in zip(mine.plan.stages, theirs.plan.stages, strict=True):
            assert (another.node, another.layers, another.bits) == (new[one.node], one.layers, one.bits)


def three_stages(memory: float = 1.6, **changes: Any) -> tuple[Plan, PlanRequest]:
    """Six layers on three cards, two each; on cards of 2 MiB they fit two at 16 bits too."""
    wished = {"min_stages": 3, "max_replicas": 1, "solver": "pipeline"} | changes | {"allowed_bits": (16,)}
    request = a_request(a_cluster(*[memory] * 3), **wished)
    return make_plan(request).plan, replace(request, min_stages=1, allowed_bits=changes.get("allowed_bits", (4, 8, 16)))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_whichever_stage_is_lost_its_neighbours_take_its_layers(place: int) -> None:
    running, request = three_stages(allowed_bits=(4, 8, 16))
    nodes = [stage.node for stage in running.stages]
    mended = repair(left(request, {nodes[place]}), running)
    assert mended.kind == "neighbours"
    assert [stage.node for stage in mended.plan.stages] == [node for node in nodes if node != nodes[place]]
    assert mended.plan.stages[0].leader
    assert mended.plan.stages[0].embedding
    assert mended.plan.stages[-1].head
    assert {layer for each in mended.steps if (layer := getattr(each, "layer", None)) is not None}


def test_two_neighbours_lost_at_once_leave_their_layers_to_the_third() -> None:
    running, request = three_stages(allowed_bits=(3, 4, 8, 16))
    nodes = [stage.node for stage in running.stages]
    mended = repair(left(request, set(nodes[:2])), running)
    assert mended.lowered
    assert [stage.layers for stage in mended.plan.stages] == [(0, 5)]
    assert mended.movement.moved_layers == 4
    assert len(mended.lost) == 2


def test_bits_are_lowered_only_as_far_as_memory_asks_and_the_least_sensitive_first() -> None:
    running, request = three_stages(sensitivity=UNEVEN, allowed_bits=(8, 16))
    lost = running.stages[1].node
    mended = repair(left(request, {lost}), running)
    assert mended.lowered
    tight = [stage.devices[0].usable_bytes - stage.memory.total_bytes for stage in mended.plan.stages]
    layer = max(stage.memory.weights_bytes // len(stage.bits) for stage in running.stages)
    assert min(tight) < layer  # not a layer more than needed
    for stage in mended.plan.stages:
        layers = range(stage.layers[0], stage.layers[1] + 1)
        low = [UNEVEN.of(layer, 8) for layer, bits in zip(layers, stage.bits, strict=True) if bits == 8]
        high = [UNEVEN.of(layer, 8) for layer, bits in zip(layers, stage.bits, strict=True) if bits == 16]
        assert max(low, default=0.0) <= min(high, default=99.0)


def test_an_exact_takeover_lowers_nothing_and_says_what_is_missing() -> None:
    running, request = three_stages()
    lost = running.stages[1].node
    assert repair(left(request, {lost}), running).lowered
    with pytest.raises(
        InfeasibleError, match=r"are missing .* without lowering bits; set replanning\.takeover\.exact to false"
    ):
        repair(left(request, {lost}), running, Takeover(exact=True))
    roomy = replace(request, cluster=a_cluster(64, 64, 64))
    mended = repair(left(roomy, {lost}), running, Takeover(exact=True))
    assert (mended.lowered, mended.kind) == ((), "neighbours")


def test_fewer_bits_than_allowed_are_not_taken() -> None:
    running, request = three_stages()
    lost = left(request, {running.stages[1].node, running.stages[2].node})
    with pytest.raises(InfeasibleError, match=r"at 8 bits or more; lower replanning\.takeover\.minBits"):
        repair(lost, running, Takeover(min_bits=8))
    assert min(bits_of(repair(lost, running, Takeover(min_bits=4)).plan.replicas[0])) == 4


def test_no_more_widths_are_taken_than_needed() -> None:
    """Kernels of every width take memory of their own."""
    running, request = three_stages()
    any_ = repair(left(request, {"b"}), running)
    assert any_.lowered == repair(left(request, {"b"}), running, Takeover(min_bits=8)).lowered
    assert {each.after for each in any_.lowered} == {8}


def test_the_perplexity_of_a_takeover_keeps_to_its_own_bound() -> None:
    running, request = three_stages(sensitivity=UNEVEN, allowed_bits=(3, 4, 8, 16))
    lost = left(replace(request, penalty_bound=0.6), {running.stages[1].node})
    loose = repair(lost, running, Takeover(max_perplexity_increase=10.0))
    cost = perplexity_increase_of(UNEVEN, loose.plan.prediction.quality_penalty)
    assert 0 < cost <= 10.0
    with pytest.raises(InfeasibleError, match=r"raise replanning\.takeover\.maxPerplexityIncrease"):
        repair(lost, running, Takeover(max_perplexity_increase=cost / 100))
    with pytest.raises(InfeasibleError, match="maxPerplexityIncrease"):
        repair(lost, running)  # the plan's own bound
    with pytest.raises(WorkloadError, match="no losses"):
        repair(replace(lost, sensitivity=None), running, Takeover(max_perplexity_increase=1.0))


FOUR = a_cluster(64, 64, 64, 64)


def four_replicas() -> tuple[Plan, PlanRequest]:
    request = a_request(FOUR, workload=Workload(32, 16, 16), allowed_bits=(8, 16))
    running = make_plan(request).plan
    assert len(running.replicas) == 4
    return running, request


def test_a_replica_that_is_gone_leaves_the_others_as_they_are() -> None:
    running, request = four_replicas()
    lost = running.replicas[1]
    mended = repair(left(request, {lost.stages[0].node}), running)
    assert mended.kind == "withoutReplica"
    assert mended.plan.replicas == (running.replicas[0], *running.replicas[2:])
    assert mended.steps[:-1] == ()
    before, after = (each.prediction.tokens_per_second for each in (running, mended.plan))
    assert after == pytest.approx(before * 3 / 4, rel=1e-3)


def test_an_idle_device_is_not_waited_for_where_survivors_have_room() -> None:
    """However much better it would be: it must be started first."""
    running, request = three_stages(allowed_bits=(16,), memory=3.0)
    node = running.stages[1].node
    mended = repair(left(replace(request, cluster=a_cluster(3.0, 3.0, 3.0, 64)), {node}), running)
    assert mended.kind == "neighbours"
    assert {stage.node for stage in mended.plan.stages} == {stage.node for stage in running.stages} - {node}


def test_an_idle_device_takes_a_lost_ones_place_where_no_survivor_is_left() -> None:
    running, request = four_replicas()
    lost = running.replicas[1].stages[0].node
    larger = replace(request, cluster=a_cluster(*[64] * 5))
    mended = repair(left(larger, {lost}), running)
    assert mended.kind == "spareDevices"
    assert mended.plan.replicas[1].stages[0].node == "e"
    assert mended.plan.replicas[1].stages[0].bits == running.replicas[1].stages[0].bits


def test_stages_further_off_give_way_where_neighbours_have_no_room() -> None:
    wished = {"min_stages": 4, "allowed_bits": (8,), "solver": "pipeline", "workload": Workload(32, 16, 1)}
    request = a_request(a_cluster(4, 1.05, 1.05, 1.05), **wished)
    running = make_plan(request).plan
    assert [(stage.node, stage.layers) for stage in running.stages] == [
        ("a", (0, 0)),
        ("b", (1, 1)),
        ("c", (2, 3)),
        ("d", (4, 5)),
    ]
    mended = repair(left(replace(request, min_stages=1), {"d"}), running)
    assert mended.kind == "reshuffle"
    assert [stage.node for stage in mended.plan.stages] == ["a", "b", "c"]
    assert mended.movement.moved_layers == 4


def test_a_group_that_lost_one_of_its_devices_is_a_lost_stage() -> None:
    model = a_model(num_attention_heads=4, num_key_value_heads=4)
    cluster = a_cluster(2, 2)
    nodes = tuple(
        msgspec.structs.replace(node, devices=(msgspec.structs.replace(node.devices[0], count=2),))
        for node in cluster.nodes
    )
    wide = msgspec.structs.replace(cluster, nodes=nodes)
    request = a_request(
        wide,
        model=model,
        tensor_parallel=(2,),
        min_stages=2,
        max_replicas=1,
        method="anyPrecision",
        allowed_bits=(4, 8, 16),
    )
    running = make_plan(request).plan
    assert [stage.tensor_parallel for stage in running.stages] == [2, 2]
    lost, kept = running.stages
    after = tuple(
        msgspec.structs.replace(
            node, devices=(msgspec.structs.replace(node.devices[0], count=1 + (node.name == kept.node)),)
        )
        for node in wide.nodes
    )
    fewer = replace(request, cluster=msgspec.structs.replace(wide, nodes=after), min_stages=1)
    mended = repair(fewer, running)
    assert mended.lost == (lost.places[1],)
    assert [stage.places for stage in mended.plan.stages] == [kept.places]


def test_what_cannot_be_repaired_says_why() -> None:
    running, request = three_stages()
    with pytest.raises(InfeasibleError, match="nothing is to be repaired"):
        repair(request, running)
    with pytest.raises(InfeasibleError, match="another request"):
        repair(left(replace(request, kv_bits=8), {"a"}), running)
    with pytest.raises(InfeasibleError, match=r"placement\.minStages asks for 3"):
        repair(left(replace(request, min_stages=3), {"a"}), running)
    gone = replace(
        request,
        cluster=msgspec.structs.replace(
            a_cluster(1), nodes=tuple(msgspec.structs.replace(n, name="z") for n in a_cluster(1).nodes)
        ),
    )
    with pytest.raises(InfeasibleError, match="lost"):
        repair(gone, running)
    with pytest.raises(WorkloadError, match=r"takeover\.minBits 1"):
        repair(left(request, {"a"}), running, Takeover(min_bits=1))


def test_fewer_sequences_run_where_their_keys_and_values_have_no_room() -> None:
    request = a_request(
        a_cluster(2.2, 2.2),
        allowed_bits=(8,),
        workload=Workload(32, 16, 16),
        solver="layout",
        max_replicas=1,
        min_stages=2,
    )
    running = make_plan(request).plan
    mended = repair(left(replace(request, min_stages=1), {running.stages[0].node}), running)
    assert mended.kind == "fewerSequences"
    assert 0 < mended.plan.replicas[0].concurrency < running.replicas[0].concurrency


def test_a_repair_says_how_much_worse_than_a_proven_plan_it_is() -> None:
    """Of a plan that was the best on more devices no plan on fewer is better: what the repair keeps of it is the bound that it states."""
    running, request = three_stages(memory=3.0, allowed_bits=(8, 16))
    for node in ("a", "b", "c"):
        after = left(request, {node})
        mended = repair(after, running)
        fresh = value_of_plan(after, make_plan(after).plan)
        before = value_of_plan(after, running)
        assert mended.loss_against(fresh) <= mended.loss_against(before) + 1e-9
        assert mended.note.kept_share == pytest.approx(1 - mended.loss_against(before), abs=1e-4)


@pytest.mark.parametrize("price", swept([None, 0.5, 40.0], [40.0]))
def test_what_a_repair_keeps_is_told_without_prices(price: float | None) -> None:
    """Devices that are gone cost nothing any more: by money a plan before its loss would look cheaper than it was, or a repair dearer."""
    running, request = four_replicas()
    larger = priced(a_cluster(*[64] * 5), {CARD: price} if price else {})
    dear = replace(request, objective=Objective("cost"), solver="layout", theta=0.0, cluster=larger)
    mended = repair(left(dear, {running.replicas[1].stages[0].node}), running)
    assert mended.kind == "spareDevices"
    assert mended.note.kept_share == pytest.approx(1, abs=1e-3)
