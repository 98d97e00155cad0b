"""Bits that move while a slot serves: running sequences go on, and their tokens are those of a model switched at the same step."""

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from strata_planner.contract.control import SWITCH_OVER, Commit, GetStatus, LayerSwitch, SetBits, SlotStatus
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear
from strata_runtime.loading import load_cache
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS, format_of, growth_of
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.slot.switching import Switches, moves_within
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.wire.client import greedy
from tests.laws import share, swept
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import load, roles
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

LAYERS = 6
PROMPT = [1, 5, 9, 2, 6, 44, 31]
ANSWER = 60


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its any-precision copy."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("any") / "model"))
    write_artefact(folder, layers=LAYERS)
    return folder


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def any_plan(model: Path, names: Sequence[str], formats: Sequence[FormatName] = ("any8",) * LAYERS) -> Plan:
    return even_plan(model, names, formats=formats)


def whole_stage(model: Path, bits: int) -> StageModel:
    return load(roles(model, 1, formats=[FORMAT_OF_BITS[bits]] * LAYERS)[0], model)


class Reference:
    """The unsliced model in transformers, whose linears are given other weights between two of its steps."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._stages = {bits: whole_stage(folder, bits) for bits in (3, 4, 8)}
        self._dense = {key: value.clone() for key, value in self._model.state_dict().items()}

    def give(self, layer: int, bits: int) -> None:
        for key, linear in self._stages[min(bits, 8)].linears(layer).items():
            assert isinstance(linear, QuantLinear)
            weight = self._dense[f"{key}.weight"] if bits == 16 else linear.dequantized()
            self._model.get_submodule(key).weight.data = weight

    def answer(self, prompt: Sequence[int], count: int, switches: Sequence[LayerSwitch]) -> list[int]:
        """Greedy: step 0 is the prompt, each other one a token."""
        for layer in range(LAYERS):
            self.give(layer, 8)
        cache, tokens, inputs = DynamicCache(), list[int](), list(prompt)
        with torch.inference_mode():
            for step in range(count):
                for switch in switches:
                    if switch.before_step == step:
                        self.give(switch.layer, switch.bits)
                logits = self._model(torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits
                inputs = [int(logits[0, -1].argmax())]
                tokens += inputs
        return tokens


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.mark.slow
def test_bits_move_while_tokens_are_drafted(model: Path, reference: Reference) -> None:
    """Down below the drafts' bits, up again and to 16: what is asked then has the text of the weights that are there, whatever drafts it."""
    names = ["s0", "s1"]
    plan = msgspec.structs.replace(any_plan(model, names), speculation=Speculation("selfPrecision", 4))
    with PipelineHarness(names) as pipeline:
        leader = pipeline.serve(plan)
        leader.send(greedy("a", PROMPT, ANSWER))
        tokens = [event.token for event in leader.events()]
        states = [
            pipeline.slots["s0"].set_bits(SetBits(epoch=pipeline.epoch, replica=0, stage=0, bits=bits))
            for bits in ({0: 3, 1: 4, 2: 16}, {0: 8, 1: 16})
        ]
        tokens += leader.collect(["a"])["a"]
        later = leader.generate([greedy("b", PROMPT, ANSWER)])["b"]
        while (hello := leader.hello()).running:
            pass
    assert [state.phase for state in states] == ["switched"] * 2
    assert len(tokens) == ANSWER
    switches = [msgspec.structs.replace(switch, before_step=0) for state in states for switch in state.done]
    assert later == reference.answer(PROMPT, ANSWER, switches)
    assert hello.accepted_tokens > 0
    assert hello.kv_usage == 0


@pytest.mark.parametrize("stages", swept([1, 2], [2]))
def test_a_running_sequence_goes_on_with_the_new_weights_from_the_step_that_is_told(
    model: Path, reference: Reference, stages: int
) -> None:
    names = [f"s{place}" for place in range(stages)]
    with PipelineHarness(names) as pipeline:
        leader = pipeline.serve(any_plan(model, names))
        leader.send(greedy("a", PROMPT, ANSWER))
        tokens = [event.token for event in leader.events()]
        wanted: dict[int, dict[int, int]] = (
            {0: {1: 4, 2: 16}, stages - 1: {5: 3}} if stages > 1 else {0: {1: 4, 2: 16, 5: 3}}
        )
        states = [
            pipeline.slots[f"s{stage}"].set_bits(SetBits(epoch=pipeline.epoch, replica=0, stage=stage, bits=bits))
            for stage, bits in wanted.items()
        ]
        tokens += leader.collect(["a"])["a"]
        status = pipeline.slots["s0"].ask(GetStatus())
    assert [state.phase for state in states] == ["switched"] * len(states)
    switches = [switch for state in states for switch in state.done]
    assert {switch.layer: switch.bits for switch in switches} == {1: 4, 2: 16, 5: 3}
    assert status.roles[0].bits[:3] == (8, 4, 16)
    assert tokens == reference.answer(PROMPT, ANSWER, switches)


@pytest.mark.slow  # test_kept_pages.py has pages of other weights
@pytest.mark.parametrize("stage", swept([0, 1], [1]))
def test_what_other_weights_computed_is_not_found(model: Path, stage: int) -> None:
    """Also by the first request after the change, of which the leader learns from that request's own step."""
    names, asked = ["s0", "s1"], greedy("first", range(40), 20)
    bits = {1: 3} if stage == 0 else {5: 3}
    formats: list[FormatName] = ["any3" if layer in bits else "any8" for layer in range(LAYERS)]
    with PipelineHarness(names) as pipeline:
        fresh = pipeline.serve(any_plan(model, names, formats)).generate([asked])["first"]
        leader = pipeline.serve(any_plan(model, names))
        assert leader.generate([asked])["first"] != fresh
        pipeline.slots[f"s{stage}"].set_bits(SetBits(pipeline.epoch, 0, stage, bits))
        for name, found in (("second", 0), ("third", 32)):
            leader.send(msgspec.structs.replace(asked, request=name))
            events = [event for event in leader.events() if event.request == name]
            assert [event.found for event in events] == [found]
            assert [event.token for event in events] + leader.collect([name])[name] == fresh


def test_a_layer_that_gets_fewer_bits_goes_first_and_tells_its_bytes(model: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(any_plan(model, ["s0"], ["any4", *["any8"] * 5]))
        state = pipeline.slots["s0"].set_bits(SetBits(1, 0, 0, {0: 8, 3: 4, 5: 8}))
    growth = growth_of(whole_stage(model, 8), 3, 4)
    assert [(done.layer, done.bits_before, done.bits) for done in state.done] == [(3, 8, 4), (0, 4, 8)]
    assert (state.done[0].added_bytes, state.done[0].returned_bytes) == (growth.added_bytes, growth.returned_bytes)
    assert state.done[1].added_bytes == growth.returned_bytes


def test_a_request_is_fulfilled_once_however_often_it_is_sent(model: Path) -> None:
    request = SetBits(1, 0, 0, {2: 4})
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(any_plan(model, ["s0"]))
        slot = pipeline.slots["s0"]
        for _ in range(3):
            slot.ask(request)
        state = slot.set_bits(request)
        assert len(state.done) == 1
        assert slot.ask(request).switches == (state,)
        assert slot.set_bits(SetBits(1, 0, 0, {2: 8})).phase == "switched"
        again = slot.set_bits(request)
        assert again.done[0].bits == 4
        assert [each.request.bits for each in slot.ask(GetStatus()).switches] == [{2: 8}, {2: 4}]


REFUSED = [
    (SetBits(7, 0, 0, {1: 4}), "epoch 1 is in force here, not 7"),
    (SetBits(1, 1, 0, {1: 4}), "slot s0 has no role of replica 1 stage 0"),
    (SetBits(1, 0, 0, {1: 4, 6: 4}), "layer 6 is not of this role, which has layers 0 to 5"),
    (SetBits(1, 0, 0, {1: 4, 2: 2}), "2 bits; a layer moves among 3, 4, 5, 6, 7, 8, 16"),
    (SetBits(1, 0, 0, {1: 4, 0: 8}), "stored in int4, from which no other bits can be made"),
]


def test_a_refused_request_changes_nothing(model: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(any_plan(model, ["s0"], ["int4", *["any8"] * 5]))
        before = leader.generate([greedy("a", PROMPT, 8)])
        for request, reason in REFUSED:
            state = pipeline.slots["s0"].set_bits(request)
            assert state.phase == "refused"
            assert reason in state.reason
            assert not state.done
            assert pipeline.slots["s0"].ask(GetStatus()).roles[0].bits == (4, 8, 8, 8, 8, 8)
        assert leader.generate([greedy("a", PROMPT, 8)]) == before


@pytest.mark.slow
def test_without_a_copy_the_refusal_names_the_command(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where other tests may have left this model's layers
    shutil.rmtree(damaged / ANY_PRECISION_FOLDER)
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(any_plan(damaged, ["s0"], ["any3", *["dense"] * 5]))
        state = pipeline.slots["s0"].set_bits(SetBits(1, 0, 0, {1: 4}))
    assert state.phase == "refused"
    assert f"run `strata quantize {damaged}`" in state.reason


@pytest.mark.slow  # loading/test_load_cache.py moves layers after such a load
def test_layers_move_that_the_slot_quantized_itself_while_it_loaded(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_cache, "FREE_SHARE", 0.0)
    shutil.rmtree(damaged / ANY_PRECISION_FOLDER)
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(any_plan(damaged, ["s0"], ["any4"] * LAYERS))
        state = pipeline.slots["s0"].set_bits(SetBits(1, 0, 0, {0: 8, 3: 3}))
        moved = leader.generate([greedy("a", PROMPT, 8)])
    formats: list[FormatName] = ["any8", "any4", "any4", "any3", "any4", "any4"]
    with PipelineHarness(["s0"]) as pipeline:
        loaded = pipeline.serve(any_plan(damaged, ["s0"], formats)).generate([greedy("a", PROMPT, 8)])
    assert state.phase == "switched"
    assert moved == loaded


def test_what_fails_half_way_keeps_what_is_done_and_serves_on(damaged: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(any_plan(damaged, ["s0"]))
        file = damaged / ANY_PRECISION_FOLDER / "any-00004.safetensors"
        with file.open("r+b") as opened:
            opened.truncate(0)
        slot = pipeline.slots["s0"]
        state = slot.set_bits(SetBits(1, 0, 0, {1: 4, 4: 4, 5: 4}))
        assert state.phase == "failed"
        assert state.reason.startswith("layer 4 keeps its bits: ")
        assert [done.layer for done in state.done] == [1]
        assert slot.ask(GetStatus()).roles[0].bits == (8, 4, 8, 8, 8, 8)
        assert len(leader.generate([greedy("a", PROMPT, 8)])["a"]) == 8


def test_memory_beyond_the_roles_budget_is_refused_unless_other_layers_give_it_back(model: Path) -> None:
    [role] = roles(model, 1, formats=["any3", *["any8"] * 5])
    stage = load(role, model)
    dense = growth_of(stage, 0, 16)
    tight = with_room(role, dense.added_bytes - 1)
    with pytest.raises(InputError, match=f"layer 0 at 16 bits does not fit: .* adds {dense.added_bytes:,}"):
        moves_within(tight, stage, {0: 16})
    assert moves_within(tight, stage, {0: 16, 3: 4}) == [(3, 4), (0, 16)]
    assert moves_within(with_room(role, dense.added_bytes), stage, {0: 16}) == [(0, 16)]
    assert moves_within(with_room(role, -1), stage, {3: 7}) == [(3, 7)], "less is never refused"


def with_room(role: Role, free_bytes: int) -> Role:
    return msgspec.structs.replace(role, predicted_bytes=role.devices[0].usable_bytes - free_bytes)


def test_the_next_epoch_takes_over_layers_that_have_moved(model: Path, reference: Reference) -> None:
    moved: list[FormatName] = ["any8", "any4", "dense", "any8", "any8", "any8"]
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(any_plan(model, ["s0"]))
        before = held(pipeline)
        pipeline.slots["s0"].set_bits(SetBits(1, 0, 0, {1: 4, 2: 16}))
        leader = pipeline.serve(any_plan(model, ["s0"], moved))
        assert held(pipeline) is before
        tokens = leader.generate([greedy("a", PROMPT, 20)])["a"]
        assert pipeline.slots["s0"].set_bits(SetBits(2, 0, 0, {1: 8, 2: 8})).phase == "switched"
        pipeline.serve(any_plan(model, ["s0"], moved))
        assert held(pipeline) is not before, "at other bits than the plan's it is loaded"
    switches = [LayerSwitch(layer, 8, bits, 0, 0, 0, 0, 0, 0) for layer, bits in ((1, 4), (2, 16))]
    assert tokens == reference.answer(PROMPT, 20, switches)


def held(pipeline: PipelineHarness) -> StageModel:
    running = pipeline.threads["s0"].slot._running
    assert running is not None
    return running.roles[0].loaded.model


def test_bits_stay_while_another_epoch_is_prepared_and_move_again_when_it_was_refused(
    model: Path, tmp_path: Path
) -> None:
    request = SetBits(1, 0, 0, {1: 4})
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(any_plan(model, ["s0"]))
        slot = pipeline.slots["s0"]
        pipeline.prepare(any_plan(model, ["s0"]))
        slot.until(lambda status: status.prepare.phase == "prepared")
        assert "epoch 2 is being prepared" in slot.set_bits(request).reason
        missing = msgspec.structs.replace(any_plan(model, ["s0"]), model_uri=str(tmp_path / "gone"))
        pipeline.prepare(missing)
        slot.until(lambda status: status.prepare.phase == "refused")
        assert slot.set_bits(request).phase == "switched"
        assert slot.ask(Commit(epoch=2)).committed_epoch == 1, "what was prepared before the move is no longer"


REQUESTS = st.dictionaries(st.integers(0, LAYERS), st.sampled_from([2, 3, 4, 5, 8, 16]), min_size=1, max_size=4)


@given(requests=st.lists(REQUESTS, max_size=4))
@settings(max_examples=share(10, 3), deadline=None)
def test_after_any_requests_the_role_tells_the_truth_and_refused_ones_changed_nothing(
    model: Path, requests: list[dict[int, int]]
) -> None:
    [role] = roles(model, 1, formats=["any8"] * LAYERS)
    stage = load(role, model)
    executor = StageExecutor(role, stage, cache_of(role, stage))
    changed = threading.Event()
    switches, expected = Switches(changed.set), [8] * LAYERS
    for bits in requests:
        switches.ask(SetBits(1, 0, 0, bits), executor)
        possible = all(layer < LAYERS and wanted > 2 for layer, wanted in bits.items())
        for layer, wanted in bits.items() if possible else ():
            expected[layer] = wanted
    while any(state.phase not in SWITCH_OVER for state in switches.states):
        changed.wait()
        changed.clear()
    switches.close()
    assert {state.phase for state in switches.states} <= {"switched", "refused"}
    assert executor.role.bits == tuple(expected)
    for layer, bits_now in enumerate(expected):
        assert {format_of(linear) for linear in stage.linears(layer).values()} == {FORMAT_OF_BITS[bits_now]}


TIGHT: dict[str, tuple[list[FormatName], list[FormatName], bool]] = {
    "fewer and more bits": (["any8"] * 6, ["any8", "any4", "dense", "any3", "any8", "any8"], True),
    "nothing that moves": (["int8"] * 6, ["any8"] * 6, False),
    "the same bits in another format": (["any8"] * 6, ["int8", *["any8"] * 5], False),
}


@pytest.mark.parametrize("name", swept(TIGHT, ["fewer and more bits"]))
def test_where_old_and_new_do_not_fit_a_role_at_other_bits_moves_what_is_held(model: Path, name: str) -> None:
    before, after, moves = TIGHT[name]
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(tight(any_plan(model, ["s0"], before)))
        old, request = held(pipeline), greedy("a", PROMPT, 20)
        leader = pipeline.serve(tight(any_plan(model, ["s0"], after)))
        assert (held(pipeline) is old) == moves
        tokens = leader.generate([request])["a"]
        assert pipeline.slots["s0"].ask(GetStatus()).roles[0].bits == tuple(BITS_OF_FORMAT[each] for each in after)
        pipeline.serve(any_plan(model, ["s0"], [*after[:5], "any7"]))
        fresh = pipeline.serve(any_plan(model, ["s0"], after))
        assert held(pipeline) is not old
        assert fresh.generate([request])["a"] == tokens


def tight(plan: Plan) -> Plan:
    """Its stage takes most of its device."""
    [replica] = plan.replicas
    [stage] = replica.stages
    memory = msgspec.structs.replace(stage.memory, total_bytes=stage.devices[0].usable_bytes * 2 // 3)
    stages = (msgspec.structs.replace(stage, memory=memory),)
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))


def bits_of(status: SlotStatus) -> Mapping[int, tuple[int, ...]]:
    return {role.stage: role.bits for role in status.roles}


def test_the_status_tells_the_bits_of_every_layer(model: Path) -> None:
    with PipelineHarness(["s0", "s1"]) as pipeline:
        pipeline.serve(any_plan(model, ["s0", "s1"]))
        pipeline.slots["s1"].set_bits(SetBits(1, 0, 1, {4: 5}))
        assert bits_of(pipeline.slots["s0"].ask(GetStatus())) == {0: (8, 8, 8)}
        assert bits_of(pipeline.slots["s1"].ask(GetStatus())) == {1: (8, 5, 8)}
