"""A role that has layers of one before: they are shared, not read again, whoever serves meanwhile, and what is not wanted any more is freed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.control import Commit, GetStatus, Prepare, SetBits, SlotAddress
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.loading.loader import Loader
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS
from strata_runtime.loading.units import AnyUnit
from strata_runtime.slot import slot
from strata_runtime.slot.prepare import Held, Loading
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness, SlotThread

ASKED = [greedy(name, range(start, start + 20), 30) for name, start in (("a", 3), ("b", 7))]
ADDRESS = SlotAddress(host="127.0.0.1", control_port=1, data_port=2, request_port=3)


class Stored:
    """The layers that loads have stored units of, in order. `hold`: the load stops before this layer until `go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.layers: list[int] = []
        self.hold = -1
        self.stopped, self.go = threading.Event(), threading.Event()
        self._real = Loader.store
        patch.setattr(Loader, "store", self._put_for())

    def _put_for(self) -> Callable[..., None]:
        def store(loader: Loader, unit: AnyUnit, piece: Any) -> None:
            if unit.layer == self.hold and not self.go.is_set():
                self.stopped.set()
                assert self.go.wait(30)
            if not self.layers or self.layers[-1] != unit.layer:
                self.layers.append(unit.layer)
            self._real(loader, unit, piece)

        return store


@pytest.fixture
def stored() -> Iterator[Stored]:
    with pytest.MonkeyPatch.context() as patch:
        yield Stored(patch)


def role_of(model: Path, slots: int, place: int) -> Role:
    names = [f"s{number}" for number in range(slots)]
    (role,) = roles_of(even_plan(model, names))[names[place]]
    return role


def preparing(epoch: int, *roles: Role) -> Prepare:
    return Prepare(epoch=epoch, key="k", roles=roles, slots={"s0": ADDRESS})


def finished(loading: Loading) -> Loading:
    assert not loading.is_alive(30)
    assert loading.state.phase == "prepared", loading.state.reason
    return loading


def last_of(role: Role) -> int:
    return role.layers[1]


@pytest.mark.slow  # test_kept_pages.py has neighbours that take over, loading/test_difference.py what is read
@pytest.mark.parametrize("bits", swept([16, 8], [8]))
def test_a_neighbour_that_takes_over_reads_what_was_lost_alone(tiny_llama: Path, stored: Stored, bits: int) -> None:
    """First slot, then both, then the second alone; the text stays."""
    with PipelineHarness(["s0", "s1"]) as pipeline:
        both = even_plan(tiny_llama, ["s0", "s1"], bits=bits)
        text = pipeline.serve(both).generate(ASKED)
        first, second = (set(range(stage.layers[0], stage.layers[1] + 1)) for stage in both.replicas[0].stages)
        assert set(stored.layers) == first | second
        stored.layers.clear()
        assert pipeline.serve(even_plan(tiny_llama, ["s0"], bits=bits)).generate(ASKED) == text
        assert set(stored.layers) == second
        stored.layers.clear()
        assert pipeline.serve(both).generate(ASKED) == text  # the second one let go of what it had, having no role
        assert set(stored.layers) == second
        stored.layers.clear()
        assert pipeline.serve(even_plan(tiny_llama, ["s1"], bits=bits)).generate(ASKED) == text
        assert set(stored.layers) == first


@pytest.mark.slow  # test_switching.py has layers that change, the test above those that were taken over
def test_layers_that_were_taken_over_change_their_bits_as_others_do(tiny_llama: Path) -> None:
    """Of a model without a copy: what the first load has quantized is there for all."""
    eight, moved = ["any8"] * 6, {0: 4, 4: 3, 5: 4}
    four = [FORMAT_OF_BITS[moved.get(layer, 8)] for layer in range(6)]
    with PipelineHarness(["s0", "s1"]) as pipeline:
        wanted = pipeline.serve(even_plan(tiny_llama, ["s1"], formats=four)).generate(ASKED)
        pipeline.serve(even_plan(tiny_llama, ["s0", "s1"], formats=eight)).generate(ASKED)
        leader = pipeline.serve(even_plan(tiny_llama, ["s0"], formats=eight))
        assert leader.generate(ASKED) != wanted
        state = pipeline.slots["s0"].set_bits(SetBits(pipeline.epoch, 0, 0, moved))
        assert state.phase == "switched", state.reason
        assert leader.generate([structs.replace(each, salt="later") for each in ASKED]) == wanted
        other = pipeline.serve(even_plan(tiny_llama, ["s0", "s1"], formats=four))
        assert other.generate([structs.replace(each, salt="last") for each in ASKED]) == wanted


def test_what_is_not_wanted_any_more_is_freed_behind_the_commit(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "LET_GO_SECONDS", -1.0)  # as if streams had gone on
    with PipelineHarness(["s0", "s1"]) as pipeline:
        pipeline.serve(even_plan(tiny_llama, ["s0"]))
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        layers = [weakref.ref(parameter) for parameter in running.roles[0].loaded.model.layers[-1].parameters()]
        assert layers
        del running
        pipeline.serve(even_plan(tiny_llama, ["s0", "s1"]))
        for _ in range(2):  # the second answer comes behind what is done after the first
            pipeline.slots["s0"].ask(GetStatus())
        gc.collect()
        assert [each() for each in layers] == [None] * len(layers)


def test_a_load_that_is_superseded_leaves_its_whole_layers(tiny_llama: Path, stored: Stored) -> None:
    half, whole = role_of(tiny_llama, 2, 0), role_of(tiny_llama, 1, 0)
    stored.hold = last_of(half)
    old = Loading(preparing(1, half), Held(), lambda: None)
    assert stored.stopped.wait(30)
    newer = preparing(2, whole)
    old.supersede(newer)
    new = Loading(newer, Held(before=old), lambda: None)
    stored.go.set()
    assert finished(new).result is not None
    assert old.state.phase == "refused"
    assert [stored.layers.count(number) for number in range(last_of(half))] == [1] * last_of(half)
    assert set(stored.layers) == set(range(last_of(whole) + 1))


@pytest.mark.parametrize(("room", "serves"), [(0, True), (-1, False)], ids=["just enough", "a byte too few"])
def test_shared_layers_count_once_where_old_and_new_are_beside_each_other(
    tiny_llama: Path, stored: Stored, room: int, *, serves: bool
) -> None:
    """Whether the old role serves on while the new one loads."""
    half, whole = role_of(tiny_llama, 2, 0), role_of(tiny_llama, 1, 0)
    thread = SlotThread("s0")
    try:
        slots = {"s0": thread.address}
        half = structs.replace(half, predicted_bytes=10**9, next=whole.next, previous=whole.previous)
        thread.ask(Prepare(epoch=1, key="k", roles=(half,), slots=slots | {"s1": thread.address}))
        thread.until(lambda status: status.prepare.phase == "prepared")
        thread.ask(Commit(epoch=1))
        running = thread.slot._running
        assert running is not None
        held = running.roles[0].loaded.model
        shared = sum(tensor.nbytes for layer in held.layers for tensor in layer.parameters())
        assert shared
        usable = 10**9 + 2 * 10**9 - shared + room
        devices = tuple(structs.replace(device, usable_bytes=usable) for device in whole.devices)
        wide = structs.replace(whole, predicted_bytes=2 * 10**9, devices=devices)
        stored.hold = last_of(whole)
        thread.ask(Prepare(epoch=2, key="k", roles=(wide,), slots=slots))
        assert stored.stopped.wait(30)
        assert bool(thread.slot._running and thread.slot._running.roles) == serves
        stored.go.set()
        thread.until(lambda status: status.prepare.phase == "prepared")
    finally:
        stored.go.set()
        thread.close()
