"""A prepare: it ends as prepared or refused whatever happens, and takes over what the one that it supersedes has loaded."""

import builtins
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.contract.control import Commit, GetStatus, Prepare, PrepareState, SlotAddress, Watch, encode
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.errors import InputError
from strata_runtime.slot import __main__ as entry
from strata_runtime.slot import prepare as load
from strata_runtime.slot import slot
from strata_runtime.slot.memory import MemoryMeter
from strata_runtime.slot.prepare import Held, Loading
from strata_runtime.wire.client import SlotClient, greedy
from tests.laws import share, swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import CONTROL_KEY, PipelineHarness, SlotThread

ASKED = [greedy(name, range(start, start + 20), 30) for name, start in (("a", 3), ("b", 7))]
ADDRESS = SlotAddress(host="127.0.0.1", control_port=1, data_port=2, request_port=3)
MOST_TURNS = 100  # of a slot, in which it lets go of what it no longer serves


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


def raised_by(kind: type[BaseException]) -> BaseException:
    for arguments in (
        ("gone \udcff wrong",),
        (),
        ("utf-8", b"x", 0, 1, "why"),
        ("x", 0, 1, "why"),
        ("why", [ValueError()]),
    ):
        try:
            return kind(*arguments)
        except (TypeError, ValueError):
            continue
    raise AssertionError(kind)


KINDS = [each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException)]
SEAMS = (
    "strata_runtime.slot.prepare.resolve_model",
    "strata_runtime.slot.prepare.device_of",
    "strata_runtime.slot.prepare.cache_of",
    "strata_runtime.loading.load.read_model_config",
    "strata_runtime.loading.load.ModelSlice",
    "strata_runtime.loading.load.find_artefact",
    "strata_runtime.loading.checkpoint._read",
    "strata_runtime.loading.stage_model.StageModel.__init__",
)


def preparing(epoch: int, *roles: Role) -> Prepare:
    return Prepare(epoch=epoch, key="k", roles=roles, slots={"s0": ADDRESS})


def ended(loading: Loading) -> PrepareState:
    while loading.is_alive(30):
        raise AssertionError("it still loads")
    return loading.state


@settings(max_examples=share(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([*KINDS, UnspeakableError]), seam=st.sampled_from(SEAMS))
def test_whatever_is_raised_anywhere_while_loading_is_a_refusal_that_can_be_sent(
    tiny_llama: Path, kind: type[BaseException], seam: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised_by(kind)

    (role,) = roles_of(even_plan(tiny_llama, ["s0"]))["s0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, fail)
        patch.setattr(load.log, "exception", lambda *_: None)  # reports of tests cannot carry every text
        loading = Loading(preparing(1, role), Held(), lambda: None)
        state = ended(loading)
    assert state.phase == "refused"
    assert state.reason
    assert encode(state)
    assert ended(Loading(preparing(2, role), Held(before=loading), lambda: None)).phase == "prepared"


def test_an_activation_that_does_not_exist_is_refused_with_the_field(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "x"}))
    (role,) = roles_of(even_plan(model, ["s0"]))["s0"]
    state = ended(Loading(preparing(1, role), Held(), lambda: None))
    assert state.phase == "refused"
    assert "config.json makes no model of 'llama'" in state.reason
    assert "x" in state.reason.partition("(")[2]


class Loads:
    """Every `load_stage` of a test: how many ran at once, of which layers; each waits for `go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.layers: list[tuple[int, int]] = []
        self.most = 0
        self._now = 0
        self._real: Callable[..., Any] = load.load_stage
        patch.setattr(load, "load_stage", self._load)

    def _load(self, role: Role, *arguments: Any, **named: Any) -> Any:
        self.layers.append(role.layers)
        self._now += 1
        self.most = max(self.most, self._now)
        self.begun.set()
        try:
            assert self.go.wait(30)
            return self._real(role, *arguments, **named)
        finally:
            self._now -= 1


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as found:
        yield found


@settings(max_examples=share(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True), min_size=2, max_size=4)
)
def test_of_prepares_in_a_row_one_loads_at_a_time_and_what_is_wanted_again_is_not_read_again(
    tiny_llama: Path, wanted: list[list[int]]
) -> None:
    roles = [role for place in roles_of(even_plan(tiny_llama, ["s0", "s1", "s2"])).values() for role in place]
    with pytest.MonkeyPatch.context() as patch:
        loads = Loads(patch)
        before: Loading | None = None
        for epoch, places in enumerate(wanted, start=1):
            prepare = preparing(epoch, *(roles[place] for place in places))
            if before is not None:
                before.supersede(prepare)
            before = Loading(prepare, Held(before=before), lambda: None)
            assert loads.begun.wait(30)
        loads.go.set()
        assert before is not None
        state = ended(before)
    assert state.phase == "prepared"
    assert state.layers_loaded == state.layers_total
    assert loads.most == 1
    assert before.result is not None
    for place, loaded in zip(wanted[-1], before.result.loaded, strict=True):
        assert loaded.model.num_layers == roles[place].layers[1] - roles[place].layers[0] + 1
        assert loads.layers.count(roles[place].layers) == 1


def test_a_prepare_that_nobody_wants_any_more_ends_at_its_next_step(
    tiny_llama: Path, patch: pytest.MonkeyPatch
) -> None:
    first, second = (place[0] for place in roles_of(even_plan(tiny_llama, ["s0", "s1"])).values())
    loads = Loads(patch)
    old = Loading(preparing(1, first), Held(), lambda: None)
    assert loads.begun.wait(30)
    newer = preparing(2, second)
    old.supersede(newer)
    new = Loading(newer, Held(before=old), lambda: None)
    loads.go.set()
    assert ended(new).phase == "prepared"
    assert (old.state.phase, old.state.reason) == ("refused", "superseded by a higher epoch")
    assert old.state.layers_loaded == 0
    assert new.state.progress > old.state.progress > 0


def test_a_slot_that_ends_while_it_loads_is_woken_by_nobody(tiny_llama: Path, patch: pytest.MonkeyPatch) -> None:
    loads, here = Loads(patch), SlotThread("s0")
    try:
        here.ask(
            Prepare(epoch=1, key="k", roles=roles_of(even_plan(tiny_llama, ["s0"]))["s0"], slots={"s0": here.address})
        )
        assert loads.begun.wait(30)
        loading = here.slot._loading
        assert loading is not None
    finally:
        here.close()
        loads.go.set()
    assert ended(loading).phase in {"prepared", "refused"}  # its thread raises nothing: warnings are errors


def test_a_prepared_epoch_whose_ports_are_taken_is_not_read_again(tiny_llama: Path, patch: pytest.MonkeyPatch) -> None:
    loads = Loads(patch)
    loads.go.set()
    (role,) = roles_of(even_plan(tiny_llama, ["s0"]))["s0"]
    thread = SlotThread("s0")
    try:
        slots = {"s0": thread.address}
        thread.ask(Prepare(epoch=1, key="k", roles=(role,), slots=slots))
        thread.until(lambda status: status.prepare.phase == "prepared")
        with pytest.MonkeyPatch.context() as broken:

            def fail(*_: Any, **__: Any) -> None:
                raise KeyError("no such worker")

            broken.setattr(slot.RunningEpoch, "begin", fail)
            assert thread.ask(Commit(epoch=1)).failure == "epoch 1: KeyError: 'no such worker'"
        thread.ask(Prepare(epoch=2, key="k", roles=(role,), slots=slots))
        thread.until(lambda status: status.prepare.phase == "prepared")
        assert thread.ask(Commit(epoch=2)).committed_epoch == 2
    finally:
        thread.close()
    assert loads.layers == [role.layers]


@pytest.mark.parametrize("before", swept(["serves", "has ended"], ["serves"]))
def test_another_number_of_pages_takes_no_reading(tiny_llama: Path, patch: pytest.MonkeyPatch, before: str) -> None:
    """The epoch before serves on, with its own pool, or made room."""
    loads = Loads(patch)
    loads.go.set()
    if before == "has ended":
        patch.setattr(slot.Slot, "_make_room", lambda held, *_: held._end_roles() or True)
    with PipelineHarness(["s0"]) as pipeline:
        thread = pipeline.threads["s0"]
        answers, pools = [], []
        for pages in (12, 40, 9):
            answers.append(pipeline.serve(even_plan(tiny_llama, ["s0"], pages=pages)).generate(ASKED))
            running = thread.slot._running
            assert running is not None
            (role,) = running.roles
            pools.append(role.loaded.cache)
    assert len(loads.layers) == 1
    assert answers[0] == answers[1] == answers[2]
    assert len({id(pool) for pool in pools}) == 3


def test_watchers_that_are_gone_are_forgotten_and_others_are_told(tiny_llama: Path) -> None:
    (role,) = roles_of(even_plan(tiny_llama, ["s0"]))["s0"]
    thread = SlotThread("s0")
    try:
        gone = SlotClient("s0", thread.address, CONTROL_KEY)
        gone.ask(Watch())
        thread.ask(Watch())
        assert len(thread.slot._watchers) == 2
        gone.close()
        for epoch in range(1, 50):
            thread.ask(Prepare(epoch=epoch, key="k", roles=(role,), slots={"s0": thread.address}))
            thread.until(lambda status: status.prepare.phase == "prepared")
            if len(thread.slot._watchers) == 1:
                break
        assert len(thread.slot._watchers) == 1
    finally:
        thread.close()


@settings(max_examples=share(50))
@given(st.lists(st.floats(0.0, 0.5), min_size=1), st.floats(1e-4, 0.2))
def test_reading_memory_takes_a_small_share_of_the_time(pauses: list[float], cost: float) -> None:
    now, reads = [0.0], [0]

    def read() -> int:
        reads[0] += 1
        now[0] += cost
        return reads[0]

    meter = MemoryMeter(read, lambda: now[0])
    for pause in pauses:
        now[0] += pause
        meter.value(fresh=False)
    assert reads[0] * cost <= cost + now[0] / 20
    assert meter.value(fresh=True) == reads[0]


def test_a_slot_at_rest_does_not_read_its_memory_for_its_watchers() -> None:
    thread = SlotThread("s0")
    try:
        thread.ask(Watch())
        looks, reads = threading.Semaphore(0), [0]
        essence = thread.slot._essence

        def seen() -> Any:
            looks.release()
            return essence()

        def read() -> int:
            reads[0] += 1
            return 0

        thread.slot._essence = seen  # type: ignore[method-assign]
        thread.slot._memory = MemoryMeter(read)
        for _ in range(3):
            assert looks.acquire(timeout=30)
        assert reads[0] <= 1, "a look at the links sends nothing, so it asks for nothing"
        assert thread.until(lambda status: not status.private_bytes).private_bytes == 0, (
            "whoever asks is told what is held now"
        )
    finally:
        thread.close()


@pytest.mark.parametrize(
    ("flags", "environment", "verify"),
    [([], "", True), (["--no-verify"], "", False), ([], "1", False), ([], "0", True)],
)
def test_planes_are_verified_unless_that_is_left_away(
    flags: list[str], environment: str, patch: pytest.MonkeyPatch, *, verify: bool
) -> None:
    patch.setenv("STRATA_CONTROL_KEY", "k")
    patch.setenv("STRATA_NO_VERIFY", environment)
    assert entry.parse(["--name", "s", "--control-port", "1", *flags]).verify is verify


def test_no_collection_goes_through_what_a_slot_has_imported(patch: pytest.MonkeyPatch) -> None:
    def slot(_: object) -> None:
        raise InputError("enough")

    patch.setenv("STRATA_CONTROL_KEY", "k")
    patch.setattr(entry, "Slot", slot)
    for name in ("set_up_heap", "warm_up", "take_all_files", "set_up_logs"):
        patch.setattr(entry, name, lambda: None)
    before = gc.get_freeze_count()
    assert entry.main(["--name", "s", "--control-port", "1"]) == 2
    assert gc.get_freeze_count() > before


def test_a_slot_hands_it_on_to_its_loads(tiny_llama: Path, patch: pytest.MonkeyPatch) -> None:
    (role,) = roles_of(even_plan(tiny_llama, ["s0"]))["s0"]
    seen: list[bool] = []

    def loads(*given: Any) -> None:
        seen.append(given[-1].verify)
        raise KeyError("enough")

    patch.setattr(load, "load_stage", loads)
    for verify in (True, False):
        ended(Loading(preparing(1, role), Held(), lambda: None, verify=verify))
    assert seen == [True, False]


def test_a_message_that_is_no_text_is_not_the_end_of_a_slot() -> None:
    thread = SlotThread("s0")
    try:
        for payload in (b'{"type":"\xf0\x28"}', b'{"type":"commit","epoch":1,"\xff":1}', b"\xff", b""):
            thread._socket.send(payload)
        assert thread.ask(Commit(epoch=1)).committed_epoch == 0
    finally:
        thread.close()


def test_the_weights_of_an_epoch_end_with_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not some time later, when Python collects what holds itself: the next epoch's are there by then."""
    monkeypatch.setattr(slot, "LET_GO_SECONDS", -1.0)  # as if streams had gone on
    gc.disable()
    try:
        with PipelineHarness(["s0"]) as pipeline:
            pipeline.serve(even_plan(tiny_llama, ["s0"])).generate([greedy("r", range(5), 3)])
            running = pipeline.threads["s0"].slot._running
            assert running is not None
            model = weakref.ref(running.roles[0].loaded.model)
            del running
            pipeline.serve(even_plan(tiny_llama, ["s0"], compute_type="bfloat16"))
            for _ in range(MOST_TURNS):  # behind the switch: a step's thread may still hold what it computed with
                pipeline.slots["s0"].ask(GetStatus())
                if model() is None:
                    break
            assert model() is None
    finally:
        gc.enable()
