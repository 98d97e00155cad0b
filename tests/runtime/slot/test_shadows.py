"""Layers that a slot keeps for a takeover: read once, slowly, within what is allowed; taken by the load that wants them, and never where the files have changed."""

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.control import Prepare
from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import DeviceRef, Plan
from strata_planner.contract.roles import roles_of
from strata_planner.contract.shadows import Shadow as Kept
from strata_planner.contract.shadows import ShadowOrder, ShadowState
from strata_runtime.loading import artefact, checkpoint, shadow_places
from strata_runtime.loading.shadow import Place, Shadow, file_state
from strata_runtime.slot import shadowing
from strata_runtime.slot.room import shadows_beside
from strata_runtime.wire.client import SlotClient, greedy
from tests.laws import swept
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

ASKED = [greedy("a", range(3, 23), 12)]
ROOM = 1 << 30


class Counted:
    """Bytes that loads have read of weights in files, and that shadows have."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loaded = self.kept = 0
        real_fill, real_planes, real_slow = checkpoint._fill, artefact._Opened.fill, shadow_places.read_slowly

        def fill(file: Any, key: str, flat: torch.Tensor) -> None:
            self.loaded += flat.nbytes
            real_fill(file, key, flat)

        def planes(opened: Any, tensors: Sequence[torch.Tensor], offset: int, **options: Any) -> Any:
            self.loaded += sum(each.nbytes for each in tensors)
            return real_planes(opened, tensors, offset, **options)

        def slowly(wanted: Any, *rest: Any, **options: Any) -> torch.Tensor:
            self.kept += wanted.place.size_bytes
            return real_slow(wanted, *rest, **options)

        patch.setattr(checkpoint, "_fill", fill)
        patch.setattr(artefact._Opened, "fill", planes)
        patch.setattr(shadowing, "read_slowly", slowly)


@pytest.fixture
def counted() -> Iterator[Counted]:
    with pytest.MonkeyPatch.context() as patch:
        yield Counted(patch)


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model of its own with an any-precision copy."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    write_artefact(model)
    return model


def with_shadow(plan: Plan, *, room: int = ROOM) -> Plan:
    """The first slot keeps all that the second has."""
    first, second = plan.stages
    kept = Kept(
        slot=first.slot,
        node=first.node,
        against=second.node,
        layers=tuple(range(second.layers[0], second.layers[1] + 1)),
        format=second.format,
        layer_bytes=(1, 1, 1),
        read_bytes=4,
        room_bytes=room,
        head_bytes=1,
    )
    return structs.replace(plan, shadows=(kept,))


def held(slot: SlotClient) -> ShadowState:
    state = slot.until(lambda status: status.shadow is not None and status.shadow.phase != "reading").shadow
    assert state is not None
    return state


@pytest.mark.parametrize("name", swept(["any4", "dense", "int8", "any8"], ["any4", "dense"]))
def test_a_takeover_reads_nothing_that_was_kept(copied: Path, counted: Counted, name: FormatName) -> None:
    formats = [name] * 6
    alone = even_plan(copied, ["s0"], formats=formats)
    read = dict[bool, int]()
    texts = list[Any]()
    for shadows in (False, True):
        plan = even_plan(copied, ["s0", "s1"], formats=formats)
        with PipelineHarness(["s0", "s1"]) as pipeline:
            texts.append(pipeline.serve(with_shadow(plan) if shadows else plan).generate(ASKED))
            if shadows:
                state = held(pipeline.slots["s0"])
                assert (state.phase, state.layers, state.reason) == ("held", 3, "")
                assert state.held_bytes == counted.kept > 0
            before = counted.loaded
            texts.append(pipeline.serve(alone).generate(ASKED))
            read[shadows] = counted.loaded - before
            if shadows:
                given_back = pipeline.threads["s0"].slot._shadowing.shadow
                assert (given_back.given_bytes, given_back.held_bytes) == (counted.kept, 0)
    assert read == {False: counted.kept, True: 0}
    assert all(text == texts[0] for text in texts)


@pytest.mark.slow  # the law of Shadow below has what is taken and let go
def test_what_stays_wanted_is_not_read_again_and_what_is_not_goes(copied: Path, counted: Counted) -> None:
    plan = with_shadow(even_plan(copied, ["s0", "s1"], bits=16))
    with PipelineHarness(["s0", "s1"]) as pipeline:
        pipeline.serve(plan)
        kept = held(pipeline.slots["s0"]).held_bytes
        pipeline.serve(plan)
        assert held(pipeline.slots["s0"]).held_bytes == kept == counted.kept
        pipeline.serve(structs.replace(plan, shadows=()))
        assert pipeline.slots["s0"].until(lambda status: status.shadow is None)
        assert pipeline.threads["s0"].slot._shadowing.shadow.held_bytes == 0


def test_no_more_is_kept_than_is_allowed(copied: Path) -> None:
    room = 100_000
    with PipelineHarness(["s0", "s1"]) as pipeline:
        pipeline.serve(with_shadow(even_plan(copied, ["s0", "s1"]), room=room))
        state = held(pipeline.slots["s0"])
    assert 0 < state.held_bytes <= room
    assert state.phase == "held"
    assert f"{room} bytes are allowed" in state.reason


def test_damaged_planes_are_not_kept_and_the_slot_serves_on(copied: Path) -> None:
    plan = with_shadow(even_plan(copied, ["s0", "s1"], formats=["dense"] * 6))
    (shadow,) = plan.shadows
    plan = structs.replace(plan, shadows=(structs.replace(shadow, format=("any4",) * 3),))
    file = copied / "strata-any" / "any-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # of the first plane
    file.write_bytes(data)
    with PipelineHarness(["s0", "s1"]) as pipeline:
        leader = pipeline.serve(plan)
        state = held(pipeline.slots["s0"])
        assert state.phase == "failed"
        assert "damaged" in state.reason
        assert leader.generate(ASKED)


class Halted:
    """Shadows stop before their fifth read until `go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.halfway, self.go, self._count = threading.Event(), threading.Event(), 0
        self._real = shadowing.read_slowly
        patch.setattr(shadowing, "read_slowly", self._read)

    def _read(self, *given: Any, **options: Any) -> torch.Tensor:
        self._count += 1
        if self._count == 5:
            self.halfway.set()
            assert self.go.wait(30)
        return self._real(*given, **options)


@pytest.mark.slow  # test_a_takeover_reads_nothing_that_was_kept takes what is whole
def test_a_takeover_in_the_middle_of_reading_takes_what_is_there(
    copied: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, halted = even_plan(copied, ["s0", "s1"]), Halted(monkeypatch)
    with PipelineHarness(["s0", "s1"]) as pipeline:
        text = pipeline.serve(with_shadow(plan)).generate(ASKED)
        assert halted.halfway.wait(30)
        before = counted.loaded
        pipeline.prepare(even_plan(copied, ["s0"]))
        pipeline.slots["s0"].until(lambda status: status.prepare.phase == "prepared")
        taken = pipeline.threads["s0"].slot._shadowing.shadow.given_bytes
        assert 0 < taken < counted.loaded - before + taken
        halted.go.set()
        assert pipeline.commit(even_plan(copied, ["s0"]), ["s0"]).generate(ASKED) == text
        pipeline.slots["s0"].until(lambda status: status.shadow is None)
        assert pipeline.threads["s0"].slot._shadowing.shadow.held_bytes == 0


def test_reading_goes_on_where_what_it_made_way_for_is_refused(
    copied: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, halted = even_plan(copied, ["s0", "s1"]), Halted(monkeypatch)
    with PipelineHarness(["s0", "s1"]) as pipeline:
        pipeline.serve(with_shadow(plan))
        assert halted.halfway.wait(30)
        pipeline.prepare(structs.replace(plan, model_uri=str(copied / "gone")))
        pipeline.slots["s0"].until(lambda status: status.prepare.phase == "refused")
        halted.go.set()
        state = held(pipeline.slots["s0"])
    assert (state.phase, state.layers, state.reason) == ("held", 3, "")
    assert state.held_bytes <= counted.kept


@pytest.mark.parametrize(
    ("kind", "bytes_", "goes_on", "stay"),
    [
        ("cpu", 100, False, {0, 1, 2, None, 4, 5}),  # it fits
        ("cpu", 101, False, {0, 1, 2, None}),  # what is loaded takes its place
        ("L4", 101, False, {0, 1, 2, None, 4, 5}),  # host memory is not the device's
        ("cpu", 100, True, {4, 5}),  # nothing is loaded
        ("cpu", 101, True, set()),
    ],
)
def test_shadows_give_way_where_memory_is_short(
    shallow_llama: Path, kind: str, bytes_: int, *, goes_on: bool, stay: set[int | None]
) -> None:
    (role,) = roles_of(even_plan(shallow_llama, ["s0"]))["s0"]
    device = DeviceRef(type=kind, index=0, usable_bytes=1000)
    role = structs.replace(role, devices=(device,), predicted_bytes=900)
    order = ShadowOrder("m", "float32", (4, 5), (("any4",), ("any4",)), most_bytes=1000)
    prepare = Prepare(epoch=2, key="k", roles=(role,), slots={}, formed=(1,) if goes_on else (), shadow=order)
    assert shadows_beside(prepare, (), bytes_) == stay
    assert shadows_beside(structs.replace(prepare, shadow=None), (), 0) == stay - {4, 5}


def test_a_file_that_has_changed_gives_nothing(tmp_path: Path) -> None:
    file, shadow = tmp_path / "weights", Shadow()
    for change in (lambda: file.write_bytes(b"other"), lambda: os.utime(file, (1, 1)), file.unlink):
        file.write_bytes(b"12345")
        place = Place(file, 1, 4)
        shadow.put(place, torch.tensor(list(b"234"), dtype=torch.uint8), file_state(file), 0)
        assert shadow.has(place)
        change()
        assert not shadow.has(place)
        assert shadow.take(file, 1, 4) is None
    assert shadow.given_bytes == 0


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "keep", "layers"]), st.integers(0, 5)), max_size=30))
def test_shadows_are_taken_once_and_counted(steps: list[tuple[str, int]]) -> None:
    """Place n: bytes n..2n of one file, of layer n."""
    shadow, there, given_bytes = Shadow(), set[int](), 0
    file = Path(__file__)
    state = file_state(file)
    for what, number in steps:
        place = Place(file, number, 2 * number + 1)
        match what:
            case "put":
                shadow.put(place, torch.zeros(number + 1, dtype=torch.uint8), state, number)
                there.add(number)
            case "take":
                found = shadow.take(file, place.begin, place.end)
                assert (found is not None) == (number in there)
                given_bytes += place.size_bytes * (number in there)
                there.discard(number)
            case "keep":
                shadow.keep({place})
                there &= {number}
            case _:
                shadow.keep_layers({None, number})
                there &= {number}
        assert shadow.held_bytes == sum(number + 1 for number in there)
        assert shadow.given_bytes == given_bytes
