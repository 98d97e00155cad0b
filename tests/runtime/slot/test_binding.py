"""Roles load and compute on the processors of their devices, where a machine has several memories: here each processor plays one."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.processors import Division, usable_processors
from strata_planner.contract.roles import roles_of
from strata_runtime.slot import prepare
from strata_runtime.slot.__main__ import parse
from strata_runtime.slot.binding import Binding
from strata_runtime.slot.slot import Slot
from strata_runtime.wire.client import greedy
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.test_ranks import shared

PLAYED = tuple(frozenset({number}) for number in sorted(usable_processors())[:2])
two_processors = pytest.mark.skipif(len(PLAYED) < 2, reason="this machine has one processor")


def bind_slot(slot: Slot, first: int) -> None:
    """As its process is told by `--devices FIRST/2`."""
    slot._place = replace(slot._place, binding=Binding(Division(first, 2), PLAYED))


def test_a_gpu_is_anywhere(tiny_llama: Path) -> None:
    (role,) = roles_of(even_plan(tiny_llama, "a"))["a"]
    on_gpu = structs.replace(role, devices=(structs.replace(role.devices[0], type="T4"),))
    binding = Binding(Division(1, 2), (frozenset({0}), frozenset({1})))
    assert binding.of(on_gpu) == frozenset()
    assert binding.of(role) == {1}


@two_processors
def test_stages_load_and_compute_beside_their_memories(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[set[int]] = []
    load = prepare.load_stage

    def seen(*arguments: Any, **named: Any) -> Any:
        loaded.append(os.sched_getaffinity(0))
        return load(*arguments, **named)

    monkeypatch.setattr(prepare, "load_stage", seen)
    plan = even_plan(tiny_llama, "ab")
    with PipelineHarness("ab") as pipeline:
        for first, thread in enumerate(pipeline.threads.values()):
            bind_slot(thread.slot, first)
        pipeline.serve(plan).generate([greedy("r", range(3, 20), 4)])
        computing = {
            thread.name: os.sched_getaffinity(thread.native_id)
            for thread in threading.enumerate()
            if thread.native_id and "stage" in thread.name
        }
    assert sorted(loaded, key=min) == [set(each) for each in PLAYED]
    assert computing == {"a replica 0 stage 0": set(PLAYED[0]), "b replica 0 stage 1": set(PLAYED[1])}


@two_processors
def test_ranks_of_a_stage_compute_beside_their_own(tiny_llama: Path) -> None:
    with PipelineHarness("a") as pipeline:
        slot = pipeline.threads["a"].slot
        bind_slot(slot, 0)
        pipeline.serve(shared(even_plan(tiny_llama, "a"), [2])).generate([greedy("r", range(3, 20), 4)])
        assert slot._running is not None
        others = slot._running.roles[0].loaded.others
        assert others is not None
        assert [os.sched_getaffinity(each.pid) for each in others.processes] == [set(PLAYED[1])]


@pytest.mark.parametrize(
    ("flags", "division"),
    [([], Division()), (["--ranks", "2"], Division(0, 2)), (["--devices", "1/4"], Division(1, 4))],
)
def test_a_slot_is_told_its_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], division: Division
) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "key")
    assert parse(["--name", "a", "--control-port", "1", *flags]).division == division


@pytest.mark.parametrize("text", ["2/2", "a/2", "1", "-1/2", "1/"])
def test_what_is_no_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "key")
    with pytest.raises(SystemExit):
        parse(["--name", "a", "--control-port", "1", f"--devices={text}"])
    assert f"'{text}': the first device of this node and how many there are, as in 0/2" in capsys.readouterr().err
