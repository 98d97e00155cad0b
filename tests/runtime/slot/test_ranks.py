"""Stages of several ranks, over real sockets, models and processes: text is that of stages of one, and what becomes of it when a rank ends or hangs."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from strata_planner.contract.control import SetBits
from strata_planner.contract.plan import DeviceRef, Plan, Speculation
from strata_planner.contract.roles import roles_of
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.ranks import shared_memory
from strata_runtime.slot.nursery import RankHandle
from strata_runtime.slot.other_ranks import check_ranks
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.plans import even_plan
from tests.runtime.slot.asked import STRATA_TINY, held_and_free, penalized
from tests.runtime.slot.eagle_heads import make_head
from tests.runtime.slot.harness import PipelineHarness


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


@pytest.mark.parametrize("ranks", swept([(2,), (2, 1), (1, 2), (3,), (2, 3)], [(2,)]))
def test_text_is_the_same_however_many_share_a_stage(tiny_llama: Path, ranks: tuple[int, ...]) -> None:
    names = [f"s{place}" for place in range(len(ranks))]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names, pages=12)
        expected = pipeline.serve(plan).generate(penalized())
        leader = pipeline.serve(shared(plan, ranks))
        assert leader.generate(penalized()) == expected
        assert leader.hello().preemptions
        leader = pipeline.serve(shared(structs.replace(plan, speculation=Speculation("ngram", 3)), ranks))  # kept ranks
        assert leader.generate(penalized()) == expected


@pytest.mark.slow
def test_answers_with_a_form_are_held_to_it_by_the_first_rank_alone() -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(STRATA_TINY, ["s0"], pages=64)
        expected = pipeline.serve(plan).generate(held_and_free())
        assert pipeline.serve(shared(plan, [2])).generate(held_and_free()) == expected


def ranks_of(pipeline: PipelineHarness, name: str) -> list[RankHandle]:
    running = pipeline.threads[name].slot._running
    assert running is not None
    (loaded,) = running.prepared.loaded
    assert loaded.others is not None
    return loaded.others.processes


def test_a_rank_that_ends_is_named_and_the_next_epoch_has_a_new_one(tiny_llama: Path) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [2])
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(penalized())
        before = ranks_of(pipeline, "s0")
        before[0].kill()
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "rank 1 of 2 of stage 0 ended with -9" in status.failure
        assert pipeline.serve(plan).generate(penalized()) == expected
        assert all(process.wait(20) is not None for process in before)
        after = ranks_of(pipeline, "s0")
    assert all(process.wait(20) is not None for process in after)  # with the slot


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE_SECONDS", 0.2)
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(shared(even_plan(tiny_llama, ["s0"]), [2]))
        (hanging,) = ranks_of(pipeline, "s0")
        os.kill(hanging.pid, signal.SIGSTOP)
        leader.send(greedy("r", range(9, 14), 5))
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "rank 1 of 2 did not come to a collective within 0.2 s" in status.failure


def test_what_no_rank_can_share_is_refused_by_name(tmp_path: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(make_tiny_model(tmp_path / "gpt2", "gpt2"), ["s0"])
        with pytest.raises(RuntimeFaultError, match=r"how 'transformer\.h\.0\.attn\.c_attn' is cut"):
            pipeline.serve(shared(plan, [2]))
        plan = even_plan(make_tiny_model(tmp_path / "llama", "llama"), ["s0"])
        with pytest.raises(RuntimeFaultError, match="5 ranks cannot share 4 heads"):
            pipeline.serve(shared(plan, [5]))


def test_several_gpus_in_a_stage_are_refused(tiny_llama: Path) -> None:
    plan = shared(even_plan(tiny_llama, ["s0"]), [2])
    (replica,) = plan.replicas
    gpus = tuple(DeviceRef(type="L4", index=index, usable_bytes=1 << 30) for index in range(2))
    stage = structs.replace(replica.stages[0], devices=gpus)
    with (
        PipelineHarness(["s0"]) as pipeline,
        pytest.raises(
            RuntimeFaultError, match=r"a stage over 2 L4: several GPUs .* not run yet; use tensorParallel \[1\]"
        ),
    ):
        pipeline.serve(structs.replace(plan, replicas=(structs.replace(replica, stages=(stage,)),)))


@pytest.mark.slow
def test_layers_of_ranks_keep_their_bits(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(shared(even_plan(tiny_llama, ["s0"]), [2]))
        state = pipeline.slots["s0"].set_bits(SetBits(epoch=pipeline.epoch, replica=0, stage=0, bits={0: 4}))
        assert "shared by 2 ranks, whose layers keep their bits" in state.reason


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
