"""A stage over GPUs: the laws of ranks with NCCL, of one GPU and, where two are seen, of two."""

from pathlib import Path

import msgspec
import pytest
import torch

from strata_planner.contract.plan import DeviceRef, Plan, Speculation
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.parity import logits
from tests.runtime.loading.shared import shared_by_torch
from tests.runtime.loading.stages import roles
from tests.runtime.plans import even_plan
from tests.runtime.slot.asked import penalized
from tests.runtime.slot.harness import PipelineHarness

pytestmark = pytest.mark.gpu
TOLERANCE = 2e-5  # of logits up to 20: sums in another order


def check_seen(gpus: int) -> None:
    if (seen := torch.cuda.device_count()) < gpus:
        pytest.skip(f"{seen} GPU on this machine: a stage over {gpus} was not run")


@pytest.fixture(autouse=True)
def _plain_products() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32, "logits are compared in float32"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "qwen2_moe", "olmo2"])
def test_ranks_on_gpus_compute_what_one_processor_does(name: str, ranks: int, tmp_path: Path) -> None:
    check_seen(ranks)
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    expected = logits(model, stages=1)
    for computed in shared_by_torch(model, ranks, role, "cuda"):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


def on_gpus(plan: Plan, count: int) -> Plan:
    """Its one stage over so many CUDA devices."""
    (replica,) = plan.replicas
    devices = tuple(DeviceRef(type="CUDA", index=index, usable_bytes=1 << 30) for index in range(count))
    (stage,) = replica.stages
    stage = msgspec.structs.replace(stage, tensor_parallel=count, devices=devices)
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=(stage,)),))


def test_text_over_two_gpus_is_that_of_one_and_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    """Prompts in chunks, prefixes that are found, preemption, drafts; the next epoch has a new rank."""
    check_seen(2)
    model = make_tiny_model(tmp_path, "llama", vocab_size=128)
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(model, ["s0"], pages=12, micro_batch=(4, 4, 16))
        expected = pipeline.serve(on_gpus(plan, 1)).generate(penalized())
        drafting = msgspec.structs.replace(plan, speculation=Speculation("ngram", 3))
        for each in (plan, drafting):
            assert pipeline.serve(on_gpus(each, 2)).generate(penalized()) == expected
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        others = running.roles[0].loaded.others
        assert others is not None
        others.processes[0].kill()
        status = pipeline.slots["s0"].until(lambda status: bool(status.failure))
        assert "rank 1 of 2 of stage 0 ended with -9" in status.failure
        assert pipeline.serve(on_gpus(plan, 2)).generate(penalized()) == expected
