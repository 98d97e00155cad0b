"""Several replicas as one plan."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from strata_planner.contract.formats import Method
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.roles import roles_of
from strata_planner.contract.values import ContractError, to_json
from strata_planner.costs.draft_model import draft_weights_bytes
from strata_planner.costs.memory import PAGE_TOKENS, kv_bytes_per_token, layer_weights_bytes
from strata_planner.errors import InfeasibleError, ModelError
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import Solver
from strata_planner.question.workload import Workload
from strata_planner.search.assembly import combined
from strata_planner.search.planning import make_plan
from tests.laws import swept
from tests.planner.builders import CARD, EAGLE, HEAD, MIB, a_cluster, a_model, a_profile, a_request


def a_plan(*memory_mib: float, concurrency: int, **changes: object) -> Plan:
    request = a_request(a_cluster(*memory_mib), workload=Workload(32, 16, concurrency))
    return make_plan(replace(request, **changes)).plan


def test_replicas_add_their_rates_and_keep_their_own_micro_batches() -> None:
    wide, narrow = a_plan(64, 64, concurrency=8, min_stages=2), a_plan(64, concurrency=2)
    both = combined([wide, narrow])
    assert Plan.decode(both.encode()) == both
    assert [replica.replica for replica in both.replicas] == [0, 1]
    assert [replica.concurrency for replica in both.replicas] == [8, 2]
    assert both.replicas[1].micro_batch == narrow.replicas[0].micro_batch
    rates = [each.prediction.tokens_per_second for each in (wide, narrow, both)]
    assert rates[2] == pytest.approx(rates[0] + rates[1])
    assert both.prediction.bound_by.startswith(("replica 0: ", "replica 1: "))
    assert sum(len(roles) for roles in roles_of(both).values()) == 3


@pytest.mark.parametrize("solver", swept(["auto", "pipeline", "exact", "transfer", "layout"], ["auto", "layout"]))
def test_what_the_runtime_is_asked_for_reaches_its_roles(solver: Solver) -> None:
    wish = Speculation("ngram", 3)
    plan = a_plan(64, 64, concurrency=8, solver=solver, prefix_caching=False, speculation=wish)
    roles = [role for listed in roles_of(Plan.decode(plan.encode())).values() for role in listed]
    assert {(role.prefix_caching, role.speculation) for role in roles} == {(False, wish)}
    plain = [role for listed in roles_of(a_plan(64, concurrency=8)).values() for role in listed]
    assert b"prefixCaching" not in to_json(plain[0]), "slots of an earlier release take the rest"


@pytest.mark.parametrize(
    ("device", "bytes_of_a_token"), [pytest.param("cpu", 2 * 128, marks=pytest.mark.slow), (CARD, 0)]
)
def test_what_stages_hand_on_counts_where_it_lies(device: str, bytes_of_a_token: int) -> None:
    """In the host's memory, which is that of processors."""
    nodes = tuple(Node(name, (Device(device, memory_bytes=64 * MIB, overhead_bytes=0),)) for name in "ab")
    cluster = Cluster(nodes, profiles={device: a_profile(type=device)})
    request = a_request(cluster, min_stages=2)
    page = 16 * 2 * 128
    plain, logged, some = (
        make_plan(replace(request, boundary_log_bytes=size)).plan for size in (0, 1 << 30, 3 * page - 1)
    )
    assert {role.boundary_log_pages for roles in roles_of(logged).values() for role in roles} == {(1 << 30) // page}
    for one, other in zip(plain.stages, logged.stages, strict=True):
        assert one.layers == other.layers
        of_a_page = [stage.memory.kv_bytes / stage.kv_page_budget for stage in (one, other)]
        assert of_a_page[1] - of_a_page[0] == 16 * bytes_of_a_token
    for one, other in zip(plain.stages, some.stages, strict=True):
        own = one.memory.kv_bytes // one.kv_page_budget
        assert other.memory.kv_bytes == other.kv_page_budget * own + 2 * 16 * bytes_of_a_token


@pytest.mark.parametrize("method", ["anyPrecision", "roundToNearest"])
def test_what_layers_draft_with_counts_as_weights(method: Method) -> None:
    """Of a plan that has room for it, and one that is given less for it."""
    wish = Speculation("selfPrecision", 4)
    plain, drafting = (
        a_plan(64, concurrency=8, method=method, allowed_bits=(8,), speculation=each) for each in (Speculation(), wish)
    )
    (stage,), (other,) = plain.stages, drafting.stages
    layer = a_request().model.layers[0]
    more = [layer_weights_bytes(layer, name, "bfloat16", wish) for name in other.format]
    less = [layer_weights_bytes(layer, name, "bfloat16") for name in stage.format]
    assert other.memory.weights_bytes - stage.memory.weights_bytes == sum(more) - sum(less)
    assert [role.drafts for listed in roles_of(drafting).values() for role in listed] == [method == "anyPrecision"]
    assert (sum(more) > sum(less)) == (method == "anyPrecision")


SMALL = a_model(num_hidden_layers=2)
DRAFT = Speculation("draft", 4, draft_uri="file:///models/smaller")


@pytest.mark.parametrize("solver", ["auto", "pipeline", "exact", "layout"])
def test_a_small_model_counts_where_the_leader_is(solver: Solver) -> None:
    """Its weights and what it works with, and its KV in every page; nowhere else."""
    plan = a_plan(16, 16, concurrency=4, solver=solver, min_stages=2, speculation=DRAFT, draft_model=SMALL)
    assert Plan.decode(plan.encode()) == plan
    for stage in plan.stages:
        layers = a_request().model.layers[stage.layers[0] : stage.layers[1] + 1]
        pages = [*layers, *(SMALL.layers if stage.leader else ())]
        kv = sum(kv_bytes_per_token(each, 16, "bfloat16") for each in pages)
        assert stage.memory.kv_bytes == stage.kv_page_budget * PAGE_TOKENS * kv
        assert (stage.memory.draft_bytes > draft_weights_bytes(SMALL, "bfloat16")) == stage.leader
    (leader,) = (role for listed in roles_of(plan).values() for role in listed if role.leader)
    assert leader.speculation == DRAFT
    assert leader.predicted_bytes == plan.stages[0].memory.total_bytes


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("solver", swept(["auto", "pipeline", "exact", "layout"], ["auto"]))
def test_a_head_counts_where_the_leader_is(solver: Solver, stages: int) -> None:
    """The fused state of each position too; of several stages each has room for the states of a step that are on their way."""
    plan = a_plan(
        32, 32, concurrency=4, solver=solver, min_stages=stages, max_stages=stages, speculation=EAGLE, draft_model=HEAD
    )
    step = plan.replicas[0].micro_batch.max_step_tokens
    on_their_way = (stages > 1) * len(EAGLE.fused) * step * 2 * a_model().hidden_size
    for stage in plan.stages:
        layers = a_request().model.layers[stage.layers[0] : stage.layers[1] + 1]
        kv = sum(kv_bytes_per_token(each, 16, "bfloat16") for each in (*layers, *(HEAD.layers if stage.leader else ())))
        state = stage.leader * 2 * a_model().hidden_size
        assert stage.memory.kv_bytes == stage.kv_page_budget * PAGE_TOKENS * (kv + state)
        more = stage.memory.draft_bytes - on_their_way
        assert more > draft_weights_bytes(HEAD, "bfloat16") if stage.leader else more == 0
    roles = [role for listed in roles_of(plan).values() for role in listed]
    assert sorted(layer for role in roles for layer in role.watched) == sorted([1, 2] * len(plan.replicas))
    if stages > 1:
        assert all(role.states_received == 2 for role in roles if role.leader)


@pytest.mark.parametrize("solver", swept(["auto", "pipeline", "exact"], ["auto"]))
def test_the_states_of_a_head_count_on_links(solver: Solver) -> None:
    """Of each token that a stage passes on, and of all of them on the way back."""
    wish = {"concurrency": 4, "solver": solver, "min_stages": 2, "max_stages": 2, "max_replicas": 1}
    plain, plan = a_plan(64, 64, **wish), a_plan(64, 64, **wish, speculation=EAGLE, draft_model=HEAD)
    (on, back), (plain_on, plain_back) = (
        [each.times.decode_transfer_seconds for each in p.stages] for p in (plan, plain)
    )
    assert plan.replicas[0].micro_batch == plain.replicas[0].micro_batch
    assert on > plain_on
    assert back - plain_back == pytest.approx(on - plain_on)


def test_devices_that_share_an_embedding_lead_no_replica_with_a_head() -> None:
    """The devices of later stages may."""
    cluster = a_cluster(64)
    (node,) = cluster.nodes
    devices = tuple(replace_struct(each, count=3) for each in node.devices)
    cluster = replace_struct(cluster, nodes=(replace_struct(node, devices=devices),))
    request = a_request(cluster, workload=Workload(32, 16, 2), speculation=EAGLE, draft_model=HEAD)
    for stages, degrees in ((1, (1, 2)), (2, (1, 2))):
        wish = replace(request, min_stages=stages, max_stages=stages, tensor_parallel=degrees)
        plan = make_plan(wish).plan
        assert all(stage.tensor_parallel == 1 for stage in plan.stages if stage.leader)
    two = replace(request, tensor_parallel=(2,))
    assert make_plan(replace(two, speculation=DRAFT, draft_model=SMALL)).plan.stages
    with pytest.raises(InfeasibleError):
        make_plan(two)


def test_layers_that_a_head_cannot_read_are_refused() -> None:
    plan = a_plan(64, concurrency=2, speculation=EAGLE, draft_model=HEAD)
    for fused in ((2, 1), (1, 1), (-1,), (a_model().num_layers,)):
        wrong = replace_struct(plan, speculation=replace_struct(EAGLE, fused=fused))
        with pytest.raises(ContractError, match="each once, ascending"):
            Plan.decode(wrong.encode())
    with pytest.raises(ModelError, match="a head reads some, and nothing else does"):
        a_plan(64, concurrency=2, speculation=replace_struct(EAGLE, fused=()), draft_model=HEAD)
    with pytest.raises(ModelError, match="a head reads some, and nothing else does"):
        a_plan(64, concurrency=2, speculation=replace_struct(DRAFT, fused=(1,)), draft_model=SMALL)


def test_a_small_model_that_does_not_fit_is_told() -> None:
    """A device that the model alone fits on."""
    assert a_plan(5, concurrency=1, allowed_bits=(8,)).stages
    large = a_model(num_hidden_layers=8)
    with pytest.raises(InfeasibleError):
        a_plan(5, concurrency=1, allowed_bits=(8,), speculation=DRAFT, draft_model=large)


@pytest.mark.parametrize("memory", swept(range(4, 16), (5, 8, 12)))
def test_what_a_small_model_keeps_of_long_texts_is_within_memory(memory: int) -> None:
    """Its KV is more than the model's own here: a plan has room for it, or there is none."""
    small = a_model(num_hidden_layers=12, intermediate_size=128)
    changes = {"max_model_len": 512, "allowed_bits": (8,), "speculation": DRAFT, "draft_model": small}
    try:
        (stage,) = a_plan(memory, concurrency=4, **changes).stages
    except InfeasibleError:
        assert memory < 12
    else:
        assert stage.memory.total_bytes <= memory * MIB


def test_one_replica_stays_what_it_is() -> None:
    plan = a_plan(64, concurrency=4)
    assert combined([plan]) == plan


def test_unlike_plans_are_refused() -> None:
    with pytest.raises(ContractError, match="share model"):
        combined([a_plan(64, concurrency=4), a_plan(64, concurrency=4, max_model_len=80)])


def test_a_replica_weighs_what_its_slowest_part_lets_through() -> None:
    replica = a_plan(64, 64, concurrency=8, min_stages=2).replicas[0]
    slowest = max(max(each.times.decode_seconds, each.times.decode_transfer_seconds) for each in replica.stages)
    assert replica.decode_rate == pytest.approx(replica.micro_batch.decode / slowest)
