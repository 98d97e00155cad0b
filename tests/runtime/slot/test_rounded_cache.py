"""A plan whose stages keep keys and values at 8 bits: half the pool, logits close by, replays alike."""

from pathlib import Path

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import roles_of
from strata_runtime.loading.load import load_stage
from strata_runtime.slot.chain import StageChain
from strata_runtime.slot.role_cache import cache_of
from tests.runtime.plans import even_plan

NAMES = ("s0", "s1", "s2")
TOKENS = {0: [5, 17, 3, 60, 22, 9, 41, 33, 8, 2, 71, 12, 90, 4, 66, 31, 7, 55, 29, 13]}
LENGTH = len(TOKENS[0])


def logits(plan: Plan, model: Path, lengths: list[int]) -> torch.Tensor:
    """Of all tokens, the text cut into segments of these lengths."""
    chain, start, rows = StageChain.load(plan, model), 0, []
    for length in lengths:
        rows.append(chain.logits(TOKENS, [Segment(0, start, length, length)]))
        start += length
    return torch.cat(rows)


def test_logits_stay_close_to_those_of_16_bits(tiny_llama: Path) -> None:
    exact, rounded = (logits(even_plan(tiny_llama, NAMES, kv_bits=bits), tiny_llama, [LENGTH]) for bits in (16, 8))
    assert 0 < float((rounded - exact).norm()) < 0.02 * float(exact.norm())


@pytest.mark.parametrize("lengths", [[1] * LENGTH, [7, 1, 12], [LENGTH - 1, 1]], ids=["decode", "chunks", "replay"])
def test_however_the_text_is_cut_the_logits_are_the_same(tiny_llama: Path, lengths: list[int]) -> None:
    plan = even_plan(tiny_llama, NAMES, kv_bits=8)
    whole, pieces = logits(plan, tiny_llama, [LENGTH]), logits(plan, tiny_llama, lengths)
    torch.testing.assert_close(pieces, whole, atol=1e-5 * max(1.0, float(whole.abs().max())), rtol=0)


def test_a_slots_pool_is_half_as_large(tiny_llama: Path) -> None:
    held = {}
    for bits in (16, 8):
        (roles, *_) = roles_of(even_plan(tiny_llama, NAMES, kv_bits=bits, compute_type="bfloat16")).values()
        model = load_stage(roles[0], tiny_llama, lambda *_: None, torch.device("cpu"))
        held[bits] = cache_of(roles[0], model).bytes
    width = 64 // 4
    assert held[8] * 2 * width == held[16] * (width + 2)
