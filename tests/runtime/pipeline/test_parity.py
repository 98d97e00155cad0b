"""Parity through the engine's own pieces: one ragged batch over three stages equals the unsliced model.

The batch mixes the second chunk of a prompt, a decode step and a two-token step of three sequences; it passes the wire's
encoding between stages. fp32, 1e-5 of the largest logit, for every architecture the engine says it runs.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_planner.contract.frames import FrameHeader, Open, Sampling, Segment, data_decoder, encode
from strata_planner.contract.roles import roles_of
from strata_runtime.loading.load import load_stage
from strata_runtime.pipeline.executor import StageExecutor
from strata_runtime.pipeline.load import cache_of
from strata_runtime.pipeline.tensors import from_bytes, to_bytes
from tests.runtime.architectures import MODELS, make_tiny_model
from tests.runtime.plans import even_plan

NAMES = ("s0", "s1", "s2")
TOKENS = {
    0: [5, 17, 3, 60, 22, 9, 41, 33, 8, 2, 71],
    1: [11, 4, 4, 90, 13, 27, 35, 6, 19, 52],
    2: [80, 1, 44, 7, 7, 63, 12, 30],
}
FIRST = [Segment(0, 0, 10, 0, 0), Segment(1, 0, 4, 0, 0), Segment(2, 0, 6, 0, 0)]
RAGGED = [Segment(1, 4, 5, 4, 5), Segment(0, 10, 1, 10, 1), Segment(2, 6, 2, 6, 2)]  # chunk, decode, two tokens


def executors_of(model: Path) -> list[StageExecutor]:
    stages = []
    for roles in roles_of(even_plan(model, NAMES)).values():
        stage = load_stage(roles[0], model, lambda done, total: None, torch.device("cpu"))
        stages.append(StageExecutor(roles[0], stage, cache_of(roles[0], stage)))
    return stages


def through(stages: list[StageExecutor], step: int, segments: list[Segment]) -> torch.Tensor:
    """Logits of all sampled rows, after the stages and the wire between them."""
    opened = [Open(sequence, Sampling()) for sequence in TOKENS] if step == 0 else []
    header = FrameHeader(0, 1, step, "", segments, opened, "float32", 0)
    flow: torch.Tensor | None = torch.tensor(
        [t for s in segments for t in TOKENS[s.sequence][s.start : s.start + s.length]]
    )
    for place, stage in enumerate(stages):
        assert flow is not None
        if place:
            sent = data_decoder.decode(encode(header))
            assert isinstance(sent, FrameHeader)
            header, flow = sent, from_bytes(bytearray(to_bytes(flow)), "float32", flow.shape[1])
        flow = stage.compute(header, flow)
    assert flow is not None
    return flow


@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_batch_over_three_stages_equals_the_unsliced_model(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / name, name)
    stages = executors_of(model)
    through(stages, 0, FIRST)
    logits = through(stages, 1, RAGGED)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        unsliced = {sequence: whole(torch.tensor([tokens])).logits[0] for sequence, tokens in TOKENS.items()}
    expected = torch.cat([unsliced[s.sequence][s.start : s.start + s.length] for s in RAGGED])
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
