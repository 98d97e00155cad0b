"""Where a start's time goes: phases in their order, and those that processes tell of in their logs."""

from pathlib import Path

from strata_operator.decide.epochs import (
    CreateEpoch,
    Ledger,
    Observed,
    RecordCommit,
    SendToGateway,
    SendToSlot,
    next_steps,
)
from strata_operator.local.phases import READY, Phases, phase_of, phases_of_processes, phases_table
from strata_operator.render.epoch import Epoch
from strata_planner.contract.phases import Phase, age_seconds, phases_in
from tests.operator.fakes import FakeGateway, FakeSlot, a_plan, addresses_of


def test_phases_follow_each_other() -> None:
    times = iter((10.0, 12.0, 15.0))
    phases = Phases("imports", 1.0, clock=lambda: next(times))
    for name in ("planning", "planning", "imports", "ready"):
        phases.enter(name)
    assert phases.ended == [Phase("imports", 3.0), Phase("planning", 3.0)]


def test_a_line_of_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = [
        "2026 INFO slot a waits",
        "phase packing: 9.000 s",
        f"2026 INFO strata_runtime.loading.load: {Phase('packing', 0.25)}",
        "phase x: soon",
    ]
    assert [*phases_in(lines)] == [Phase("packing", 9.0), Phase("packing", 0.25)]
    (tmp_path / "a.log").write_text("\n".join(lines))
    (tmp_path / "gateway.log").write_text("nothing")
    assert phases_of_processes(tmp_path) == {"a": (Phase("packing", 0.25),)}


def test_the_table_has_all_phases_and_their_sum() -> None:
    table = phases_table([Phase("planning", 1.0), Phase("imports", 2.0)], {"a": [Phase("packing", 0.25)]})
    names, seconds = (list(column.cells) for column in table.columns)
    assert dict(zip(names, seconds, strict=True)) == {
        "planning": "1.00",
        "imports": "2.00",
        "all": "3.00",
        "within a: packing": "0.25",
    }


def test_what_a_deployment_waits_for() -> None:
    """From its first look to its last, every phase in its turn."""
    plan, slot, gateway, ledger = a_plan("a"), FakeSlot("a"), FakeGateway(), Ledger()
    seen, phases = Observed({}, {}, {}), [phase_of(plan, ledger, Observed({}, {}, {}), forks=False)]
    for _ in range(8):
        phases.append(phase_of(plan, ledger, seen, forks=True))
        seen = Observed({"a": slot.status()}, {"gateway": gateway.status()}, addresses_of("a"))
        phases.append(phase_of(plan, ledger, seen, forks=True))
        for step in next_steps(plan, ledger, seen):
            match step:
                case CreateEpoch():
                    ledger = Ledger(Epoch(step.number, "key", step.plan), ledger.committed)
                case RecordCommit(number=number):
                    ledger = Ledger(ledger.newest, number)
                case SendToSlot(message=message):
                    slot.handle(message)
                case SendToGateway(message=route):
                    gateway.handle(route)
        slot.finish_loading()
    assert [*dict.fromkeys(phases)] == [
        "imports",
        "processes and warm-up",
        "reading and packing",
        "connecting",
        "first route",
        READY,
    ]


def test_a_process_has_an_age(tmp_path: Path) -> None:
    assert 0 < age_seconds() < 1e7
    stat = tmp_path / "stat"
    stat.write_text(f"7 (a name) of ) two) {' '.join(['S', *map(str, range(4, 22)), '0', *map(str, range(23, 53))])}")
    assert age_seconds(stat) > age_seconds(), "it was started with the machine"
    assert age_seconds(tmp_path / "none") == 0
