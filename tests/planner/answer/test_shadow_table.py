"""Shadows as people read them: who keeps what against which loss, and what it costs and brings."""

from dataclasses import replace

from rich.console import Console

from strata_planner.answer.explain import render_plan
from strata_planner.answer.shadows import READ_BYTES_PER_SECOND, busiest_reads
from strata_planner.contract.shadows import Shadow, kept_bytes
from strata_planner.replan.losses import losses_table, told_of_losses
from strata_planner.replan.repair import Takeover
from strata_planner.replan.shadows import with_shadows
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_cluster, a_request

GB = 10**9


def shadow(slot: str, against: str, layers: tuple[int, ...], *, size: int = GB, read: int = 0, head: int = 0) -> Shadow:
    return Shadow(
        slot=slot,
        node=slot,
        against=against,
        layers=layers,
        format=("any4",) * len(layers),
        layer_bytes=(size,) * len(layers),
        read_bytes=read or size * len(layers) + head,
        room_bytes=1 << 40,
        head_bytes=head,
    )


def text_of(thing: object) -> str:
    console = Console(width=200)
    with console.capture() as said:
        console.print(thing)
    return said.get()


def test_what_several_losses_have_in_common_is_counted_once() -> None:
    kept = (shadow("a", "b", (1, 2)), shadow("a", "c", (2, 3), head=5), shadow("d", "b", (9,)))
    assert kept_bytes(kept) == {"a": 3 * GB + 5, "d": GB}


def test_the_slot_that_reads_most_counts() -> None:
    both = [shadow("a", "b", (1,), read=3 * GB), shadow("c", "b", (2, 3))]
    assert busiest_reads(both) == (2 * GB, 3 * GB)


def test_a_plan_and_its_losses_tell_of_shadows_where_there_are_any() -> None:
    request = a_request(a_cluster(2, 2, 3), min_stages=3, time_limit_seconds=0.5, method="anyPrecision")
    plan = make_plan(request, quick=True).plan
    assert "shadows" not in text_of(render_plan(plan))
    request = replace(request, min_stages=1)
    found = with_shadows(request, plan, Takeover(), 1 << 40).plan
    said = text_of(render_plan(found))
    assert "of host memory on" in said
    assert f"{READ_BYTES_PER_SECOND / 1e9:.1f} GB/s" in said
    for each in found.shadows:
        assert f"{each.slot}: layers {each.layers[0]}" in said
    lost = found.shadows[0].against
    left = replace(request, cluster=request.cluster.without({lost}))
    rows = told_of_losses(found, [(f"-{lost}", left, None)], Takeover())
    assert "of it shadowed" in text_of(losses_table(rows))
    assert rows[0].as_json()["shadowedBytes"] > 0
