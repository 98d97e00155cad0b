"""Strategies of a stage that several ranks share: outputs are the same whichever runs, and when they change between the steps of a sequence."""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import RUN_STRATEGIES, SWITCHED, StrategyName
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.strategies import SwitchedLayer
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.laws import swept
from tests.runtime.architectures import ALL, make_tiny_model
from tests.runtime.loading.parity import FIRST, RAGGED, logits, make_texts
from tests.runtime.loading.shared import part
from tests.runtime.loading.stages import roles
from tests.runtime.ranks.together import together

TOLERANCE = 1e-5
OTHERS = RUN_STRATEGIES[1:]
CHANGING: tuple[StrategyName, ...] = ("weight-gathered", "megatron", "all-to-all", "projection-replicated")


def with_all(role: Role) -> Role:
    """The role with a table for which its ranks share their weights."""
    return structs.replace(role, strategies=((1, "megatron"), (2, "weight-gathered")))


def stepped(stage: StageModel, role: Role, strategies: Sequence[StrategyName]) -> torch.Tensor:
    """Logits of the ragged batch's steps, one below the other, each step by the next strategy."""
    cache, blocks, texts = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens), make_texts()
    computed = []
    for segments, strategy in zip((FIRST, RAGGED), islice(cycle(strategies), 2), strict=True):
        inputs = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in segments])
        computed.append(stage.forward(inputs, cache.plan(blocks.deal(segments)), strategy=strategy))
    return computed[-1]


def of_ranks(model: Path, ranks: int, role: Role, strategies: Sequence[StrategyName]) -> list[tuple[torch.Tensor, int]]:
    """From each rank: its logits, and how many of its layers can switch."""

    def body(collectives: SharedMemory) -> tuple[torch.Tensor, int]:
        stage = part(with_all(role), model, collectives)
        return stepped(stage, role, strategies), sum(isinstance(each.forward, SwitchedLayer) for each in stage.layers)

    return together(ranks, body)


def check(model: Path, ranks: int, role: Role, strategies: Sequence[StrategyName], expected: torch.Tensor) -> None:
    for computed, switched in of_ranks(model, ranks, role, strategies):
        assert switched == role.layers[1] - role.layers[0] + 1
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


CASES = [(name, ranks, (strategy,)) for name in sorted(SWITCHED) for ranks in (2, 3) for strategy in OTHERS]


@pytest.mark.parametrize(
    "case",
    swept(CASES, [("llama", ranks, (strategy,)) for ranks in (2, 3) for strategy in OTHERS]),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2][0]}",
)
def test_every_strategy_computes_what_one_rank_does(case: tuple[str, int, tuple[StrategyName]], tmp_path: Path) -> None:
    name, ranks, strategies = case
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    check(model, ranks, role, strategies, logits(model, stages=1))


@pytest.mark.parametrize("strategies", [CHANGING[place:] + CHANGING[:place] for place in range(len(CHANGING))])
def test_strategies_change_between_the_steps_of_a_sequence(strategies: Sequence[StrategyName], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen2")
    [role] = roles(model, 1)
    check(model, 3, role, strategies, logits(model, stages=1))
