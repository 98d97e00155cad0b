"""The plan as people read it."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from strata_planner.answer.explain import bits_summary, formats_summary, loss_lines, render_plan
from strata_planner.search.planning import make_plan
from strata_planner.units import human_bytes
from tests.planner.builders import a_cluster, a_request


def test_the_table_names_what_matters() -> None:
    outcome = make_plan(a_request(a_cluster(64, 64), min_stages=2, theta=1e6, solver="pipeline"))
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(render_plan(outcome.plan, outcome))
    text = captured.get()
    for expected in (
        "card #0",
        "embedding",
        "head",
        "x16",
        "tokens/s",
        "bound by:",
        "search: optimal",
        "note: sensitivity",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({}, []),
        (
            {"prefix_caching": False},
            ["a change of plan has all KV of replica 0 computed again: without prefix caching"],
        ),
        (
            {"boundary_log_bytes": 1 << 20},
            ["boundary log: 1 of 2 stages keep what they hand on in host memory, of up to"],
        ),
        (
            {"boundary_log_bytes": 1 << 20, "prefix_caching": False},
            ["a change of plan has all KV of replica 0 computed again: without prefix caching"],
        ),
    ],
)
def test_what_a_loss_costs_beside_layers_is_told(wishes: dict[str, Any], told: list[str]) -> None:
    plan = make_plan(a_request(a_cluster(64, 64), min_stages=2, max_replicas=1, solver="pipeline", **wishes)).plan
    lines = loss_lines(plan)
    assert [line.startswith(one) for line, one in zip(lines, told, strict=True)] == [True] * len(told), lines


def test_a_stage_of_several_ranks_keeps_no_kv_and_no_log() -> None:
    plan = make_plan(a_request(a_cluster(64), boundary_log_bytes=1 << 20, solver="pipeline")).plan
    (replica,) = plan.replicas
    stage = msgspec.structs.replace(replica.stages[0], tensor_parallel=2, devices=replica.stages[0].devices * 2)
    (line,) = loss_lines(msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=(stage,)),)))
    assert (
        line
        == "a change of plan has all KV of replica 0 computed again: a stage of several ranks has pages in each of them"
    )


def test_bits_are_summed_up() -> None:
    assert bits_summary((16, 16, 4, 8, 4, 4)) == "2x16 1x8 3x4"


def test_formats_are_told_where_bits_alone_do_not_tell_them() -> None:
    plan = make_plan(a_request(a_cluster(64), method="anyPrecision", allowed_bits=(5,), kv_bits=8)).plan
    assert formats_summary(plan) == f"{plan.num_layers}xany5; keys and values: 8 bits"


def test_bytes_are_readable() -> None:
    assert [human_bytes(each) for each in (512, 1536, 3 << 20, 5 << 30)] == ["512 B", "1.5 KiB", "3 MiB", "5 GiB"]
