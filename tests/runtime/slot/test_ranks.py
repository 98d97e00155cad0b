"""Stages of several ranks, over real sockets, models and processes: text is that of stages of one, and what becomes of it when a rank ends or hangs."""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.control import GetStatus, LayerSwitch, SetBits
from strata_planner.contract.formats import FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER
from strata_planner.contract.plan import DeviceRef, Plan, Speculation
from strata_planner.contract.roles import roles_of
from strata_planner.contract.shares import Shares
from strata_planner.contract.strategies import StrategyTable
from strata_planner.costs.communication import handed_over_bytes, hidden_states_bytes
from strata_planner.question.model import Model
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.precision_switch import growth_of, read_change
from strata_runtime.model.random_model import make_random_model
from strata_runtime.ranks import collectives, shared_memory
from strata_runtime.slot import other_ranks
from strata_runtime.slot.nursery import RankHandle
from strata_runtime.slot.other_ranks import check_ranks, held_by_ranks, idle_of_ranks
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import CPU, Stages
from tests.runtime.plans import even_plan
from tests.runtime.ranks.together import together
from tests.runtime.slot.asked import STRATA_TINY, held_and_free, penalized
from tests.runtime.slot.conftest import SHAPES
from tests.runtime.slot.eagle_heads import make_head
from tests.runtime.slot.harness import PipelineHarness

LAYERS = 6
PROMPT = [1, 5, 9, 2, 6, 44, 31]
ANSWER = 60


def unlike(plan: Plan, *shares: Shares) -> Plan:
    """The plan with ranks of these shares in its stages, each with threads of its own."""
    (replica,) = shared(plan, [len(each) for each in shares]).replicas
    stages = tuple(
        structs.replace(
            stage,
            shares=each,
            devices=tuple(structs.replace(device, threads=1 + (device.index == 0)) for device in stage.devices),
            rank_memory=tuple(structs.replace(stage.memory, total_bytes=1000 * share) for share in each),
        )
        for stage, each in zip(replica.stages, shares, strict=True)
    )
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


def shared(plan: Plan, ranks: Sequence[int]) -> Plan:
    """The plan with so many ranks in each of its stages."""
    (replica,) = plan.replicas
    stages = tuple(
        structs.replace(
            stage,
            tensor_parallel=count,
            devices=tuple(DeviceRef(type="cpu", index=index, usable_bytes=1 << 30) for index in range(count)),
        )
        for stage, count in zip(replica.stages, ranks, strict=True)
    )
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


@pytest.mark.slow  # the test of a rank that ends has text, loading/test_ranks.py has logits
@pytest.mark.parametrize("ranks", swept([(2,), (2, 1), (1, 2), (3,), (2, 3)], [(2,)]))
def test_text_is_the_same_however_many_share_a_stage(tiny_llama: Path, ranks: tuple[int, ...]) -> None:
    names = [f"s{place}" for place in range(len(ranks))]
    with PipelineHarness(names) as pipeline:
        text_of_one(pipeline, even_plan(tiny_llama, names, pages=12), ranks)


def text_of_one(pipeline: PipelineHarness, plan: Plan, ranks: Sequence[int]) -> dict[str, list[int]]:
    """That of stages of one rank each, which those of more have too, preempted and with drafts."""
    expected = pipeline.serve(plan).generate(penalized())
    leader = pipeline.serve(shared(plan, ranks))
    assert leader.generate(penalized()) == expected
    assert leader.hello().preemptions
    leader = pipeline.serve(shared(structs.replace(plan, speculation=Speculation("ngram", 3)), ranks))  # kept ranks
    assert leader.generate(penalized()) == expected
    return expected


@pytest.mark.slow  # loading/test_unlike_ranks.py has the arithmetic, and the tests below the slots
@pytest.mark.parametrize("shares", swept([((3, 1),), ((1, 3), (1, 2, 1))], [((3, 1),)]))
def test_text_is_the_same_whatever_the_shares_of_ranks(tiny_llama: Path, shares: tuple[Shares, ...]) -> None:
    """Prompts in chunks, prefixes that are found, preemption, drafts; and other shares on the same devices are loaded anew."""
    names = [f"s{place}" for place in range(len(shares))]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names, pages=12, micro_batch=(4, 4, 16))
        expected = pipeline.serve(plan).generate(penalized())
        leader = pipeline.serve(unlike(plan, *shares))
        assert leader.generate(penalized()) == expected
        assert leader.hello().preemptions
        before = [rank.pid for rank in ranks_of(pipeline, "s0")]
        assert pipeline.slots["s0"].ask(GetStatus()).private_bytes > held_by_ranks() > idle_of_ranks() > 0
        turned = tuple(each[::-1] for each in shares)
        leader = pipeline.serve(unlike(structs.replace(plan, speculation=Speculation("ngram", 3)), *turned))
        assert leader.generate(penalized()) == expected
        assert before != [rank.pid for rank in ranks_of(pipeline, "s0")]


def test_every_rank_is_started_with_the_threads_of_its_device(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Sequence[str]] = []

    class Nursery:
        def start(self, arguments: Sequence[str], *_: int, fresh: bool) -> RankHandle:
            assert not fresh
            started.append(arguments)
            raise InputError("enough")

    monkeypatch.setattr(other_ranks, "the_nursery", lambda *_: Nursery())
    for plan, threads in (
        (unlike(even_plan(tiny_llama, ["s0"]), (3, 1)), 1),
        (shared(even_plan(tiny_llama, ["s0"]), [2]), torch.get_num_threads()),
    ):
        ((role,),) = roles_of(plan).values()
        with pytest.raises(InputError, match="enough"):
            other_ranks.OtherRanks(role, tiny_llama, verify=True)
        assert started.pop()[-2:] == ["--threads", str(threads)]


def test_what_a_slot_is_expected_to_take_is_the_sum_of_its_unlike_ranks(tiny_llama: Path) -> None:
    ((role,),) = roles_of(unlike(even_plan(tiny_llama, ["s0"]), (3, 1))).values()
    assert (role.total_bytes, role.predicted_bytes) == (4000, 3000)


TOKEN_BYTES = 8  # of an id, as stage 0 gets them


@pytest.mark.slow  # costs/test_communication.py counts
@pytest.mark.parametrize("ranks", swept([(2, 1), (1, 2), (2, 3)], [(1, 2)]))
def test_one_rank_sends_and_one_receives_between_unequal_groups_as_the_planner_counts(
    tiny_llama: Path, ranks: tuple[int, int]
) -> None:
    """HexGen's leader-only transfer: hidden states cross the link once, whatever the groups; their leader hands them to its other ranks."""
    names = ["s0", "s1"]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names, pages=12)
        pipeline.serve(shared(plan, ranks)).generate(penalized())
        first, last = (pipeline.slots[name].ask(GetStatus()).roles[0] for name in names)
    passed = first.prefill_tokens + first.decode_tokens
    crossed = hidden_states_bytes(Model.from_folder(tiny_llama), passed, plan.compute_type)
    assert (first.sent_bytes, last.sent_bytes) == (crossed, 0)
    assert first.shared_bytes == handed_over_bytes(ranks[0], passed * TOKEN_BYTES)
    assert last.shared_bytes == handed_over_bytes(ranks[1], crossed)


@pytest.mark.slow  # loading/test_strategies.py holds it of logits
def test_text_is_the_same_when_strategies_switch_between_prompt_and_answer(tiny_llama: Path) -> None:
    """Prompts in chunks, by the table of each length; answers by Megatron, verifications of drafts by what their rows say."""
    table: StrategyTable = ((1, "megatron"), (3, "projection-replicated"), (8, "weight-gathered"))
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(tiny_llama, ["s0"], pages=12, micro_batch=(4, 4, 16))
        expected = pipeline.serve(plan).generate(penalized())
        (replica,) = shared(plan, [2]).replicas
        stages = tuple(structs.replace(stage, strategies=table) for stage in replica.stages)
        switching = structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))
        assert pipeline.serve(switching).generate(penalized()) == expected
        drafting = structs.replace(switching, speculation=Speculation("ngram", 3))
        assert pipeline.serve(drafting).generate(penalized()) == expected
        assert held_by_ranks() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "qwen2_moe", "gpt_oss", "olmo2", "deepseek_v3"])
def test_text_of_every_kind_of_layer_is_the_same(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name, vocab_size=128)
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(model, ["s0"], pages=12)
        expected = pipeline.serve(plan).generate(penalized())
        leader = pipeline.serve(shared(structs.replace(plan, speculation=Speculation("ngram", 3)), [3]))
        assert leader.generate(penalized()) == expected


KEEPING = [(name, each) for name in ("lfm2", "qwen3_next", "qwen3_5_text") for each in (((3, 1),), ((1, 1), (1, 2, 1)))]


@pytest.mark.parametrize("case", swept(KEEPING, KEEPING[:1]), ids=str)
def test_states_on_ranks_go_with_their_sequences(case: tuple[str, tuple[Shares, ...]], tmp_path: Path) -> None:
    """Prompts in chunks, sequences that are preempted and computed again, more of them than states, and the next epoch on the same ranks."""
    name, shares = case
    model = make_tiny_model(tmp_path, name, vocab_size=128)
    names = [f"s{place}" for place in range(len(shares))]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(model, names, pages=12, micro_batch=(4, 4, 16))
        expected = pipeline.serve(plan).generate(penalized())
        for _ in range(2):
            leader = pipeline.serve(unlike(plan, *shares))
            assert leader.generate(penalized()) == expected
            assert leader.hello().preemptions


@pytest.mark.slow
def test_answers_with_a_form_are_held_to_it_by_the_first_rank_alone() -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(STRATA_TINY, ["s0"], pages=64)
        expected = pipeline.serve(plan).generate(held_and_free())
        assert pipeline.serve(shared(plan, [2])).generate(held_and_free()) == expected


def ranks_of(pipeline: PipelineHarness, name: str) -> list[RankHandle]:
    running = pipeline.threads[name].slot._running
    assert running is not None
    (role,) = running.roles
    loaded = role.loaded
    assert loaded.others is not None
    return loaded.others.processes


def test_a_rank_that_ends_is_named_and_the_next_epoch_has_a_new_one(tiny_llama: Path) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [2])
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(penalized())
        before = ranks_of(pipeline, "s0")
        status = pipeline.slots["s0"].ask(GetStatus())
        assert status.idle_bytes - pipeline.threads["s0"].slot._idle_bytes == idle_of_ranks() > 0
        assert held_by_ranks() > idle_of_ranks(), "what each has loaded counts"
        before[0].kill()
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "rank 1 of 2 of stage 0 ended with -9" in status.failure
        assert pipeline.serve(plan).generate(penalized()) == expected
        assert all(process.wait(20) is not None for process in before)
        after = ranks_of(pipeline, "s0")
    assert all(process.wait(20) is not None for process in after)  # with the slot


class LookedError(Exception):
    """Often enough."""


def test_a_rank_that_hangs_while_it_loads_does_not_count_as_progress(tiny_llama: Path) -> None:
    """The slot's control loop then says that the load stands still: the first rank's waiting kept it quiet for ever."""
    ((role,),) = roles_of(shared(even_plan(tiny_llama, ["s0"]), [2])).values()
    others = other_ranks.OtherRanks(role, tiny_llama, verify=True)
    (process,) = others.processes
    os.kill(process.pid, signal.SIGSTOP)
    looks, steps = [], []

    def looked() -> None:
        looks.append(len(steps))
        if len(looks) > 2:
            raise LookedError

    with pytest.raises(LookedError):
        others.wait_loaded(looked, lambda: steps.append(1))
    assert looks[-1] == looks[-2], "what it sent before it was stopped is heard first"
    os.kill(process.pid, signal.SIGCONT)
    others.wait_loaded(lambda: None, lambda: steps.append(1))
    assert steps
    others.end()
    assert process.wait(20) is not None


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_next_epoch_has_a_new_one(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [2])
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(penalized())
        leader = pipeline.serve(plan)
        (hanging,) = ranks_of(pipeline, "s0")
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        others = running.roles[0].loaded.others
        assert others is not None
        monkeypatch.setattr(others.collectives, "_patience", 0.2)
        os.kill(hanging.pid, signal.SIGSTOP)
        leader.send(greedy("r", range(9, 14), 5))
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "rank 1 of 2 did not come to a collective within 0.2 s" in status.failure
        leader = pipeline.serve(plan)
        assert hanging.wait(20) is not None
        assert leader.generate(penalized()) == expected


def test_what_no_rank_can_share_is_refused_by_name(tmp_path: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(make_tiny_model(tmp_path / "delta", "qwen3_next", linear_num_value_heads=2), ["s0"])
        with pytest.raises(RuntimeFaultError, match="3 ranks cannot share 2 heads of linear attention"):
            pipeline.serve(shared(plan, [3]))
        plan = even_plan(make_tiny_model(tmp_path / "llama", "llama"), ["s0"])
        with pytest.raises(RuntimeFaultError, match="5 ranks cannot share 4 heads"):
            pipeline.serve(shared(plan, [5]))


def on_gpus(plan: Plan, types: Sequence[str]) -> Plan:
    (replica,) = plan.replicas
    gpus = tuple(DeviceRef(type=name, index=index, usable_bytes=1 << 30) for index, name in enumerate(types))
    stage = structs.replace(replica.stages[0], devices=gpus)
    return structs.replace(plan, replicas=(structs.replace(replica, stages=(stage,)),))


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (["L4", "L4"], r"a stage over the L4 0, 1: this slot sees 0 GPUs, .* use tensorParallel \[1\]"),
        (["L4", "T4"], r"a stage over L4 and T4: its devices must be of one type"),
        (["L4", "cpu"], r"a stage over L4 and cpu: its devices must be of one type"),
    ],
)
def test_gpus_that_no_stage_can_be_run_on_are_refused(
    tiny_llama: Path, types: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (role,) = roles_of(on_gpus(shared(even_plan(tiny_llama, ["s0"]), [2]), types))["s0"]
    with pytest.raises(InputError, match=says):
        check_ranks(role)


def test_each_rank_has_a_gpu_of_its_own_and_a_program_of_its_own(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Sequence[str], bool]] = []

    class Nursery:
        def start(self, arguments: Sequence[str], *_: int, fresh: bool) -> RankHandle:
            started.append((arguments, fresh))
            raise InputError("enough")

    monkeypatch.setattr(other_ranks, "the_nursery", lambda *_: Nursery())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (role,) = roles_of(on_gpus(shared(even_plan(tiny_llama, ["s0"]), [2]), ["L4", "L4"]))["s0"]
    check_ranks(role)
    with pytest.raises(InputError, match="enough"):
        other_ranks.OtherRanks(role, tiny_llama, verify=True)
    [(arguments, fresh)] = started
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (told["--device"], told["--collectives"], fresh) == ("cuda:1", "distributed", True)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks talk by torch.distributed, as those of GPUs do, and machines without the native library."""
    monkeypatch.setattr(other_ranks, "kind_for", lambda _: "distributed")


@pytest.mark.slow  # loading/test_ranks.py has logits, ranks/test_process_group.py who does not come
@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("ranks", swept([(2,), (1, 3), (2, 2)], [(2,)]))
def test_text_is_the_same_where_ranks_talk_by_torch(tiny_llama: Path, ranks: tuple[int, ...]) -> None:
    """Prompts in chunks, prefixes that are found, preemption, drafts; a rank that ends is named, and the next epoch has a new one."""
    names = [f"s{place}" for place in range(len(ranks))]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names, pages=12, micro_batch=(4, 4, 16))
        expected = text_of_one(pipeline, plan, ranks)
        ranks_of(pipeline, names[-1])[0].kill()
        status = pipeline.slots[names[-1]].until(lambda status: bool(status.failure))
        assert f"rank 1 of {ranks[-1]} of stage {len(ranks) - 1} ended with -9" in status.failure
        assert pipeline.serve(shared(plan, ranks)).generate(penalized()) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_within_a_step_ends_its_role_where_ranks_talk_by_torch(
    tiny_llama: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [3])
    monkeypatch.setattr(collectives, "PATIENCE_SECONDS", 5.0)  # of three processes on few processors
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(penalized())
        leader = pipeline.serve(plan)
        leader.send(greedy("r", range(9, 14), 90))
        next(iter(leader.events()))
        os.kill(ranks_of(pipeline, "s0")[1].pid, how)
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "of 3" in status.failure
        monkeypatch.undo()
        monkeypatch.setattr(other_ranks, "kind_for", lambda _: "distributed")
        assert pipeline.serve(plan).generate(penalized()) == expected


@pytest.mark.slow  # each rank imports torch
@pytest.mark.usefixtures("by_torch")
def test_ranks_that_are_programs_of_their_own_compute_the_same(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_ranks, "_starts_fresh", lambda _: True)
    plan = even_plan(tiny_llama, ["s0"], pages=12)
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(penalized())
        assert pipeline.serve(shared(plan, [2])).generate(penalized()) == expected
        (rank,) = ranks_of(pipeline, "s0")
        assert b"strata_runtime.slot.rank_process" in Path(f"/proc/{rank.pid}/cmdline").read_bytes()
    assert rank.wait(20) is not None


@pytest.fixture(scope="module")
def movable(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its any-precision copy."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("any") / "model"))
    write_artefact(folder, layers=LAYERS)
    return folder


def any_plan(model: Path, formats: Sequence[FormatName] = ("any8",) * LAYERS) -> Plan:
    return even_plan(model, ["s0"], formats=formats)


MOVED: list[FormatName] = ["any8", "any4", "dense", "any8", "any8", "any3"]
MOVES = {1: 4, 2: 16, 5: 3}


@pytest.mark.slow  # loading/test_ranks.py has layers that change on all ranks, test_switching.py streams that run
@pytest.mark.parametrize("case", swept([(2, "shared"), (3, "shared"), (3, "distributed")], [(2, "shared")]))
def test_layers_of_ranks_change_their_bits_together_while_streams_run(
    movable: Path, case: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step that is told on, as a stage of one rank whose layers change at the same steps; and all of the text that comes later."""
    ranks, kind = case
    monkeypatch.setattr(other_ranks, "kind_for", lambda _: kind)
    with PipelineHarness(["s0"]) as pipeline:
        slot = pipeline.slots["s0"]
        later = pipeline.serve(any_plan(movable, MOVED)).generate(penalized())
        leader = pipeline.serve(shared(any_plan(movable), [ranks]))
        leader.send(greedy("a", PROMPT, ANSWER))
        tokens = [event.token for event in leader.events()]
        state = slot.set_bits(SetBits(pipeline.epoch, 0, 0, MOVES))
        tokens += leader.collect(["a"])["a"]
        assert state.phase == "switched"
        assert tokens == switched_alone(movable, state.done)
        assert leader.generate(penalized()) == later
        before = ranks_of(pipeline, "s0")
        leader = pipeline.serve(shared(any_plan(movable, MOVED), [ranks]))  # the next epoch takes over what has moved
        assert ranks_of(pipeline, "s0") is before
        assert leader.generate(penalized()) == later


def switched_alone(model: Path, switches: Sequence[LayerSwitch]) -> list[int]:
    """The greedy answer to the prompt of a stage of one rank that changes its layers before the same steps."""
    [role] = roles_of(any_plan(model))["s0"]
    whole = Stages(model, [role])
    tokens: list[int] = []
    for step in range(ANSWER):
        for switch in switches:
            if switch.before_step == step:
                read_change(whole.models[0], switch.layer, switch.bits).apply()
        start, text = (len(PROMPT) + step - 1, 1) if step else (0, len(PROMPT))
        logits = whole.step({0: torch.tensor(PROMPT + tokens)}, [Segment(0, start, text, 1)])
        tokens.append(int(logits[0].argmax()))
    return tokens


@pytest.mark.slow
def test_a_change_that_one_rank_cannot_take_changes_none(tmp_path: Path) -> None:
    """Of three ranks over two key heads the last has the queries of two: it alone has no room."""
    model = make_random_model(tmp_path, "llama", num_hidden_layers=LAYERS, **SHAPES | {"intermediate_size": 48})
    write_artefact(model, layers=LAYERS)
    plan = any_plan(model, ["any3"] * LAYERS)
    [role] = roles_of(plan)["s0"]

    def growth(collectives: shared_memory.SharedMemory) -> int:
        stage = load_stage(role, model, lambda *_: None, CPU, LoadOptions(collectives=collectives))
        return growth_of(stage, 0, 16).added_bytes

    growths = together(3, growth)
    assert growths[2] > growths[0]
    usable = 1 << 30
    with PipelineHarness(["s0"]) as pipeline:
        slot = pipeline.slots["s0"]
        leader = pipeline.serve(taking(shared(plan, [3]), usable - growths[0]))
        before = leader.generate(penalized())
        state = slot.set_bits(SetBits(pipeline.epoch, 0, 0, {0: 16}))
        assert state.phase == "refused"
        assert "rank 2: layer 0 at 16 bits does not fit" in state.reason
        assert leader.generate(penalized()) == before
        assert slot.ask(GetStatus()).roles[0].bits == (3,) * LAYERS


@pytest.mark.slow
def test_where_old_and_new_do_not_fit_ranks_at_other_bits_move_what_they_hold(movable: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(any_plan(movable, MOVED)).generate(penalized())
        much = (1 << 30) * 2 // 3
        pipeline.serve(taking(shared(any_plan(movable), [2]), much))
        before = ranks_of(pipeline, "s0")
        leader = pipeline.serve(taking(shared(any_plan(movable, MOVED), [2]), much))
        assert ranks_of(pipeline, "s0") is before
        assert leader.generate(penalized()) == expected


def taking(plan: Plan, size_bytes: int) -> Plan:
    """Its stage takes so much of each device."""
    (replica,) = plan.replicas
    (stage,) = replica.stages
    stages = (structs.replace(stage, memory=structs.replace(stage.memory, total_bytes=size_bytes)),)
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


@pytest.mark.slow
def test_a_layer_that_cannot_be_read_keeps_its_bits_on_all_ranks(movable: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(movable, tmp_path / "model"))
    with PipelineHarness(["s0"]) as pipeline:
        slot = pipeline.slots["s0"]
        leader = pipeline.serve(shared(any_plan(model), [2]))
        before = leader.generate(penalized())
        file = model / ANY_PRECISION_FOLDER / "any-00004.safetensors"
        planes = file.read_bytes()
        file.write_bytes(b"")
        refused = slot.set_bits(SetBits(pipeline.epoch, 0, 0, {1: 2}))
        assert (refused.phase, refused.done) == ("refused", ())
        state = slot.set_bits(SetBits(pipeline.epoch, 0, 0, {4: 4}))
        assert state.phase == "failed"
        assert state.reason.startswith("layer 4 keeps its bits: ")
        assert leader.generate(penalized()) == before
        file.write_bytes(planes)
        assert slot.set_bits(SetBits(pipeline.epoch, 0, 0, {4: 4})).phase == "switched"
        moved = leader.generate(penalized())
        formats: list[FormatName] = [*["any8"] * 4, "any4", "any8"]  # type: ignore[list-item]
        assert moved == pipeline.serve(any_plan(movable, formats)).generate(penalized())


@pytest.mark.slow
def test_a_stage_of_ranks_hands_on_what_a_head_reads(tiny_llama: Path, tmp_path: Path) -> None:
    head, names, several = make_head(tmp_path, tiny_llama), ["s0", "s1"], penalized(4, 20)
    with PipelineHarness(names) as pipeline:
        expected = pipeline.serve(even_plan(tiny_llama, names)).generate(several)
        wish = Speculation("eagle", 3, draft_uri=str(head), fused=(1, 2, 5))
        make_head(tmp_path, tiny_llama, eagle_aux_hidden_state_layer_ids=[2, 3, 6])
        leader = pipeline.serve(structs.replace(shared(even_plan(tiny_llama, names), [1, 2]), speculation=wish))
        assert leader.generate(several) == expected
        assert leader.hello().draft_tokens > 0


def test_a_head_that_drafts_is_refused_beside_parts_of_an_embedding(tiny_llama: Path) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [2])
    (role,) = roles_of(structs.replace(plan, speculation=Speculation("eagle", 3, draft_uri="file:///head")))["s0"]
    with pytest.raises(InputError, match="a head of EAGLE-3 beside a stage over 2 devices"):
        check_ranks(role)
