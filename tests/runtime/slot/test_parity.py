"""Parity through the engine's own pieces: one ragged batch over three stages equals the unsliced model.

The batch mixes the second chunk of a prompt, a decode step and a two-token step of three sequences; it passes the wire's
encoding between stages. fp32, 1e-5 of the largest logit, for every architecture the engine says it runs.
"""

from pathlib import Path

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_runtime.slot.chain import StageChain
from tests.runtime.architectures import SHORT_SWEEP, make_tiny_model, unsliced
from tests.runtime.plans import even_plan

NAMES = ("s0", "s1", "s2")
TOKENS = {
    0: [5, 17, 3, 60, 22, 9, 41, 33, 8, 2, 71],
    1: [11, 4, 4, 90, 13, 27, 35, 6, 19, 52],
    2: [80, 1, 44, 7, 7, 63, 12, 30],
}
FIRST = [Segment(0, 0, 10, 0), Segment(1, 0, 4, 0), Segment(2, 0, 6, 0)]
RAGGED = [Segment(1, 4, 5, 5), Segment(0, 10, 1, 1), Segment(2, 6, 2, 2)]  # chunk, decode, two tokens


@pytest.mark.parametrize("name", SHORT_SWEEP)
def test_a_ragged_batch_over_three_stages_equals_the_unsliced_model(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / name, name)
    chain = StageChain.load(even_plan(model, NAMES), model)
    chain.logits(TOKENS, FIRST)
    logits = chain.logits(TOKENS, RAGGED)
    whole = unsliced(model)
    with torch.inference_mode():
        alone = {sequence: whole(torch.tensor([tokens])).logits[0] for sequence, tokens in TOKENS.items()}
    expected = torch.cat([alone[s.sequence][s.start : s.start + s.length] for s in RAGGED])
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_a_text_scored_over_stages_has_the_unsliced_models_log_probabilities(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "llama", "llama")
    chain = StageChain.load(even_plan(model, NAMES), model)
    whole = unsliced(model)
    for tokens in TOKENS.values():
        with torch.inference_mode():
            logs = whole(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        expected = torch.stack([logs[place, token] for place, token in enumerate(tokens[1:])])
        assert torch.allclose(chain.score(tokens), expected, atol=1e-4)
