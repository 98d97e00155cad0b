"""Inventories from a stock that is kept up to date are those that listing everything anew would give, whatever came in which order."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_operator.api import LLMDeployment
from strata_operator.decide.ledger import DeviceLedger
from strata_operator.observe import inventories as inventories_module
from strata_operator.observe.inventories import Inventories
from strata_operator.observe.inventory import InventoryOptions, take_inventory
from strata_operator.observe.kube import NODES, PODS, Kind
from strata_operator.observe.stock import Stock
from strata_operator.render.requests import amounts
from strata_operator.render.slots import Claim
from tests.laws import share
from tests.operator.builders import a_deployment, a_node, a_pod

Object = dict[str, Any]
NAMES = ["a", "b", "c", "d"]
OPTIONS = InventoryOptions()


def deployments() -> list[LLMDeployment]:
    """Two that place alike, one that may not be on a, one that wants a label."""
    specs: list[Object] = [{}, {}, {"placement": {"exclude": ["a"]}}, {"placement": {"nodeSelector": {"pool": "x"}}}]
    found = []
    for number, spec in enumerate(specs):
        thing = a_deployment(f"d{number}").with_spec(**spec).build()
        found.append(thing.model_copy(update={"metadata": thing.metadata.model_copy(update={"uid": f"uid-{number}"})}))
    return found


DEPLOYMENTS = deployments()


@st.composite
def nodes(draw: st.DrawFn) -> Object:
    node = a_node(draw(st.sampled_from(NAMES)))
    if draw(st.booleans()):
        node = node.with_gpus("Tesla-T4", draw(st.integers(1, 4)))
    else:
        node = node.as_cpu_device("8", "32Gi")
    if draw(st.booleans()):
        node = node.in_zone(draw(st.sampled_from(["1", "2"])), "n")
    thing = (node.cordoned() if draw(st.integers(0, 4)) == 0 else node).build()
    thing["metadata"]["labels"] = {
        **(thing["metadata"].get("labels") or {}),
        **draw(st.sampled_from([{}, {"pool": "x"}])),
    }
    return thing


@st.composite
def pods(draw: st.DrawFn) -> Object:
    name = f"p{draw(st.integers(0, 4))}"
    pod = a_pod(name)
    if draw(st.booleans()):
        owner = draw(st.sampled_from(DEPLOYMENTS))
        pod = pod.of_slot(owner, f"{owner.name}-s{draw(st.integers(0, 1))}")
    if draw(st.integers(0, 3)):
        pod = pod.on(draw(st.sampled_from(NAMES)))
    asked = draw(st.sampled_from([{"cpu": "1"}, {"memory": "4Gi"}, {"gpu": "1"}, {"cpu": "500m", "memory": "1Gi"}]))
    thing = pod.requesting(**asked).build()
    thing.setdefault("status", {})["phase"] = draw(st.sampled_from(["Running", "Running", "Succeeded"]))
    return thing


@st.composite
def ledgers(draw: st.DrawFn) -> DeviceLedger:
    claims: dict[str, tuple[Claim, ...]] = {}
    for each in draw(st.lists(st.sampled_from(DEPLOYMENTS), unique_by=lambda one: one.name, max_size=3)):
        requests = amounts(draw(st.sampled_from([{"nvidia.com/gpu": "1"}, {"cpu": "2", "memory": "2Gi"}])))
        slot = f"{each.name}-s{draw(st.integers(0, 1))}"
        claims[each.metadata.uid] = (Claim(each.namespace, each.name, slot, draw(st.sampled_from(NAMES)), requests),)
    return DeviceLedger(claims)


Event = tuple[Kind, Object, bool]
events = st.tuples(st.just(NODES), nodes(), st.booleans()) | st.tuples(st.just(PODS), pods(), st.booleans())


def key(kind: Kind, thing: Object) -> tuple[str, str]:
    return kind.plural, thing["metadata"]["name"]


@settings(max_examples=share(60), deadline=None)
@given(st.lists(st.tuples(st.lists(events, max_size=4), ledgers()), min_size=1, max_size=5))
def test_they_are_what_listing_everything_anew_would_give(rounds: list[tuple[list[Event], DeviceLedger]]) -> None:
    stock, there, version = Stock(), {}, 0
    inventories = Inventories(stock, OPTIONS)
    for heard, ledger in rounds:
        for kind, thing, gone in heard:
            version += 1
            said = {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(version)}}
            stock.hear(kind, said, gone=gone)
            there.pop(key(kind, thing), None)
            if not gone:
                there[key(kind, thing)] = thing
        things = [thing for (plural, _), thing in there.items() if plural == "nodes"]
        others = [thing for (plural, _), thing in there.items() if plural == "pods"]
        for deployment in DEPLOYMENTS:
            claims = ledger.others(deployment.metadata.uid)
            expected = take_inventory(deployment, things, others, claims, OPTIONS)
            found = inventories.of(deployment, ledger)
            assert (found, found.digest) == (expected, expected.digest)
            assert inventories.of(deployment, ledger) is found


def heard(*things: tuple[Kind, Object]) -> Stock:
    stock = Stock()
    for version, (kind, thing) in enumerate(things, start=1):
        stock.hear(kind, {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(version)}})
    return stock


def test_what_others_do_on_nodes_that_it_may_not_use_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it make anybody look before the next look comes."""
    elsewhere = a_node("a").with_gpus("Tesla-T4", 2).build()
    pool = a_node("b").with_gpus("Tesla-T4", 2).build()
    pool["metadata"]["labels"]["pool"] = "x"
    stock = heard((NODES, elsewhere), (NODES, pool))
    inventories, of_pool = Inventories(stock, OPTIONS), DEPLOYMENTS[3]
    before, news = inventories.of(of_pool, DeviceLedger()), stock.news
    worked_out: list[str] = []
    offer_of = inventories_module.offer_of

    def counted(deployment: LLMDeployment, node: Object, *rest: Any) -> Any:
        worked_out.append(node["metadata"]["name"])
        return offer_of(deployment, node, *rest)

    monkeypatch.setattr(inventories_module, "offer_of", counted)
    for number, node in enumerate("aab"):
        pod = a_pod(f"p{number}").on(node).requesting(gpu="1").build()
        stock.hear(PODS, {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(10 + number)}})
        after = inventories.of(of_pool, DeviceLedger())
    assert worked_out == ["b"]
    assert stock.news == news
    assert (before.devices, after.devices) == (2, 1)


def test_a_promise_that_changes_hands_is_another_inventory_for_both() -> None:
    stock = heard((NODES, a_node("a").with_gpus("Tesla-T4", 1).build()))
    inventories, gpu = Inventories(stock, OPTIONS), amounts({"nvidia.com/gpu": "1"})

    def devices(owner: LLMDeployment) -> list[int]:
        claim = Claim(owner.namespace, owner.name, f"{owner.name}-s0", "a", gpu)
        ledger = DeviceLedger({owner.metadata.uid: (claim,)})
        return [inventories.of(each, ledger).devices for each in DEPLOYMENTS[:2]]

    assert devices(DEPLOYMENTS[0]) == [1, 0]
    assert devices(DEPLOYMENTS[1]) == [0, 1]


@settings(max_examples=share(60), deadline=None)
@given(st.lists(st.tuples(events, st.integers(1, 3)), max_size=8), st.randoms(use_true_random=False))
def test_of_each_object_the_newest_version_counts_in_whatever_order_events_come(
    heard: list[tuple[Event, int]], draw: Random
) -> None:
    """Twice, late, or after its end."""
    said = [
        (kind, {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(number)}}, gone)
        for number, ((kind, thing, gone), _) in enumerate(heard, start=1)
    ]
    again = [event for event, (_, times) in zip(said, heard, strict=True) for _ in range(times)]
    draw.shuffle(again)
    one, other = Stock(), Stock()
    for stock, order in ((one, said), (other, again)):
        for kind, thing, gone in order:
            stock.hear(kind, thing, gone=gone)
    for deployment in DEPLOYMENTS:
        assert one.node_views() == other.node_views()
        inventories = [Inventories(stock, OPTIONS).of(deployment, DeviceLedger()) for stock in (one, other)]
        assert inventories[0] == inventories[1]


def test_what_decides_nothing_changes_nothing() -> None:
    stock = Stock()
    node = a_node("a").with_gpus("Tesla-T4", 1).build()
    pod = a_pod("p").on("a").build()

    def say(version: int) -> None:
        beat = {"type": "Ready", "status": "True", "lastHeartbeatTime": str(version)}
        status = {**node["status"], "conditions": [beat], "images": [{"names": ["x"]}] * version}
        stock.hear(NODES, {**node, "status": status, "metadata": {**node["metadata"], "resourceVersion": str(version)}})
        meta = {**pod["metadata"], "resourceVersion": str(version), "annotations": {"seen": str(version)}}
        stock.hear(PODS, {**pod, "metadata": meta, "status": {"phase": "Running", "podIP": str(version)}})

    say(1)
    changes = stock.changes
    say(2)
    assert stock.changes == changes
    assert stock.changed_nodes(changes) == []


def test_a_list_ends_what_it_does_not_name_but_not_what_was_written_since() -> None:
    stock = Stock()

    def node(name: str, version: int) -> Object:
        thing = a_node(name).build()
        return {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(version)}}

    for name, version in (("gone", 3), ("new", 9)):
        stock.hear(NODES, node(name, version))
    with stock.listing(NODES, "") as listing:
        listing.take([node("there", 2)], 5)
    assert set(stock.node_views()) == {"there", "new"}
    stock.hear(NODES, node("gone", 4))  # said late: the list of 5 did not have it
    assert set(stock.node_views()) == {"there", "new"}
    stock.hear(NODES, node("gone", 10))
    assert set(stock.node_views()) == {"there", "new", "gone"}


def test_the_loss_of_a_node_moves_those_alone_that_may_use_it() -> None:
    stock = Stock()
    inventories = Inventories(stock, OPTIONS)

    def say(version: int, *, ready: bool) -> None:
        node = a_node("a").with_gpus("Tesla-T4", 1)
        thing = (node if ready else node.not_ready()).build()
        stock.hear(NODES, {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(version)}})

    say(1, ready=True)
    before = [inventories.of(each, DeviceLedger()) for each in DEPLOYMENTS]
    say(2, ready=False)
    after = [inventories.of(each, DeviceLedger()) for each in DEPLOYMENTS]
    assert [one is other for one, other in zip(before, after, strict=True)] == [False, False, True, True]
