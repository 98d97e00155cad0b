"""`strata set-bits`: who is asked for what, what wrong wishes are told, and a deployment of processes that only speak."""

import asyncio
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from strata_operator.act.control_client import Endpoint
from strata_operator.commands import set_bits as command
from strata_operator.commands.set_bits import SetBitsOptions, Wish, parse_layers, wishes_of
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.local.errors import RefusedError
from strata_operator.local.record import RunningDeployment, folder, recorded, running_deployment
from tests.operator.act.test_control_client import SECRET, serving
from tests.operator.fakes import FakeSlot, a_plan

PLAN = a_plan("a", "b", layers=6)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    assert not list(folder().glob("*"))


def record(**ports: int) -> RunningDeployment:
    return RunningDeployment("tiny", os.getpid(), SECRET, ports, PLAN)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("3", [3]), ("0-2", [0, 1, 2]), ("4, 1-2,2", [1, 2, 4]), ("5-4", None), ("1-", None), ("x", None), ("2-6", None)],
)
def test_layers_are_ranges_and_numbers_of_the_model(text: str, layers: list[int] | None) -> None:
    if layers is None:
        with pytest.raises(InvalidInputError, match="--layers"):
            parse_layers(text, 6)
    else:
        assert parse_layers(text, 6) == layers


def test_a_range_downwards_is_turned_round() -> None:
    with pytest.raises(InvalidInputError, match="a range goes upwards; write 4-5"):
        parse_layers("5-4", 6)


def test_each_stage_is_asked_for_its_own_layers() -> None:
    wishes = wishes_of(SetBitsOptions("tiny", "1-3", 4, None), record())
    assert wishes == [Wish("a", 0, 0, (1, 2)), Wish("b", 0, 1, (3,))]
    assert wishes_of(SetBitsOptions("tiny", "5", 16, 0), record()) == [Wish("b", 0, 1, (5,))]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SetBitsOptions("tiny", "1", 2, None), "2 is none of 3, 4, 5, 6, 7, 8, 16"),
        (SetBitsOptions("tiny", "1", 4, 3), "3 is none of the 1 replicas"),
        (SetBitsOptions("tiny", "6", 4, None), "the model has layers 0 to 5"),
    ],
)
def test_a_wish_that_cannot_be_is_told_before_anyone_is_asked(options: SetBitsOptions, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        wishes_of(options, record())


def test_a_record_is_its_users_alone_and_goes_with_the_deployment() -> None:
    with recorded("tiny", PLAN, {"a": Endpoint("127.0.0.1", 1234, SECRET)}):
        [path] = folder().glob("*")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found = running_deployment("tiny")
        assert (found.plan, found.endpoint("a")) == (PLAN, Endpoint("127.0.0.1", 1234, SECRET))
        with pytest.raises(InvalidInputError, match=r"no deployment of this name runs here; running are: tiny"):
            running_deployment("other")
    with pytest.raises(InvalidInputError, match=r"no deployment of this name runs here; start one with `strata up"):
        running_deployment("tiny")


async def switched(slots: list[FakeSlot], options: SetBitsOptions) -> None:
    """The command, against slots that answer here."""
    async with serving(slots[0]) as first, serving(slots[1]) as second:
        endpoints = {each.slot.name: Endpoint("127.0.0.1", each.port, SECRET) for each in (first, second)}
        with recorded("tiny", PLAN, endpoints):
            await asyncio.to_thread(command.run, options)


async def test_all_slots_that_hold_the_layers_are_asked_in_their_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    slots = [FakeSlot("a"), FakeSlot("b")]
    for slot in slots:
        slot.committed = 7
    await switched(slots, SetBitsOptions("tiny", "2-4", 8, None))
    requests = [slot.switches[0].request for slot in slots]
    assert [(each.epoch, each.stage, each.bits) for each in requests] == [(7, 0, {2: 8}), (7, 1, {3: 8, 4: 8})]
    assert capsys.readouterr().out.count("16 -> 8") == 3


async def test_a_slot_that_keeps_its_bits_is_an_error_beside_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    slots = [FakeSlot("a"), FakeSlot("b")]
    slots[1].refuses = "no any-precision copy"
    with pytest.raises(RefusedError, match="slot b: no any-precision copy"):
        await switched(slots, SetBitsOptions("tiny", "2-4", 8, None))
    out = capsys.readouterr().out
    assert out.count("16 -> 8") == 1
    assert "unchanged" in out


def test_a_slot_that_is_away_is_worth_another_try() -> None:
    with recorded("tiny", PLAN, {"a": Endpoint("127.0.0.1", 1, SECRET)}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ask", _away)
        with pytest.raises(NotReadyError, match="no answer"):
            command.run(SetBitsOptions("tiny", "0", 8, None))


async def _away(*_: object) -> None:
    raise command.NoAnswerError("no answer from 127.0.0.1:1")


def test_layers_that_had_their_bits_are_told_as_such() -> None:
    wish = Wish("a", 0, 0, (0, 1))
    state = FakeSlot("a")._switch(command.SetBits(epoch=1, replica=0, stage=0, bits={1: 4}))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(command.shown([command.Answer(wish, state)]))
    text = console.export_text()
    assert "had them" in text
    assert "-1.0" in text
