"""Two stages on one card: the same slots, frames and tokens as on a CPU."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_planner.contract.plan import DeviceRef, Plan
from strata_runtime.wire.client import greedy
from tests.runtime.architectures import make_tiny_model
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

pytestmark = pytest.mark.gpu
PROMPT, ANSWER = [5, 17, 3, 60, 22, 9, 41], 12


def on_one_card(plan: Plan) -> Plan:
    """Every stage on CUDA device 0."""
    card = (DeviceRef(type="CUDA", index=0, usable_bytes=1 << 30),)
    stages = tuple(msgspec.structs.replace(stage, devices=card) for stage in plan.replicas[0].stages)
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replicas[0], stages=stages),))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "opt"])
def test_two_stages_on_one_card_give_the_unsliced_models_tokens(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / name, name)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    output = whole.generate(
        torch.tensor([PROMPT], device="cuda"), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with PipelineHarness(["s0", "s1"]) as pipeline:
        leader = pipeline.serve(on_one_card(even_plan(model, ["s0", "s1"])))
        got = leader.generate([greedy("a", PROMPT, ANSWER), greedy("b", PROMPT[:3], ANSWER)])
    assert got["a"] == output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_quantized_stages_answer_alike_on_card_and_cpu(bits: int, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "llama", "llama", hidden_size=128, intermediate_size=256, head_dim=32)
    answers = []
    for placed in (lambda plan: plan, on_one_card):
        with PipelineHarness(["s0", "s1"]) as pipeline:
            leader = pipeline.serve(placed(even_plan(model, ["s0", "s1"], bits=bits)))
            answers.append(leader.generate([greedy("a", PROMPT, 4)]))
    assert answers[0] == answers[1]
