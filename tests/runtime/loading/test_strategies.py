"""Strategies of a stage that several ranks share: outputs are the same whichever runs, and when they change between the steps of a sequence."""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.architectures import SUPPORTED
from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import (
    STRATEGIES,
    SWITCHED,
    SWITCHED_FORMATS,
    StrategyName,
    why_not_switched,
)
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.kernels import native_dense
from strata_runtime.loading.precision_switch import read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.strategies import SwitchedLayer
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.laws import swept
from tests.runtime.architectures import ALL, make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.parity import FIRST, RAGGED, logits, make_texts
from tests.runtime.loading.shared import part
from tests.runtime.loading.stages import load, roles
from tests.runtime.loading.test_ranks import tolerance
from tests.runtime.ranks.together import together

TOLERANCE = 1e-5
OTHERS = STRATEGIES[1:]
CHANGING: tuple[StrategyName, ...] = ("weight-gathered", "megatron", "projection-replicated")


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
    swept(CASES, [("llama", ranks, (strategy,)) for ranks, strategy in zip((2, 3), OTHERS, strict=True)]),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2][0]}",
)
def test_every_strategy_computes_what_one_rank_does(case: tuple[str, int, tuple[StrategyName]], tmp_path: Path) -> None:
    name, ranks, strategies = case
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    check(model, ranks, role, strategies, logits(model, stages=1))


TURNS = [CHANGING[place:] + CHANGING[:place] for place in range(len(CHANGING))]


@pytest.mark.parametrize("strategies", swept(TURNS, TURNS[:1]))
def test_strategies_change_between_the_steps_of_a_sequence(strategies: Sequence[StrategyName], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen2")
    [role] = roles(model, 1)
    check(model, 3, role, strategies, logits(model, stages=1))


@pytest.mark.parametrize(
    "formats",
    swept([("int8",) * 6, ("dense", "any4", "int8", "any6", "dense", "int8")], [("dense", "any4", "int8") * 2]),
)
def test_layers_in_formats_that_are_not_shared_run_megatron(formats: Sequence[FormatName], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama", intermediate_size=200)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed, switched in of_ranks(model, 2, role, CHANGING):
        assert switched == sum(name in SWITCHED_FORMATS for name in formats)
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("compute_type", swept(["bfloat16", "float32"], ["bfloat16"]))
def test_ranks_hand_on_the_same_bits_whichever_strategy_runs(compute_type: ComputeType, tmp_path: Path) -> None:
    """Sums are rounded once, in the order of ranks. Kernels whose sums depend on the number of rows may round otherwise; then far less than a type does."""
    model = make_tiny_model(tmp_path, "qwen3")
    [role] = roles(model, 1, compute_type=compute_type)
    (plain, _), *_ = of_ranks(model, 2, role, ["megatron"])
    alike = native_dense.takes(COMPUTE_DTYPES[compute_type], torch.device("cpu"))
    for strategy in OTHERS:
        for computed, _ in of_ranks(model, 2, role, [strategy]):
            torch.testing.assert_close(computed, plain, rtol=0, atol=0 if alike else TOLERANCE)


@pytest.mark.slow  # test_ranks.py has layers that change on all ranks
def test_a_layer_that_changes_its_bits_runs_megatron_from_then_on(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    write_artefact(model)
    [role] = roles(model, 1)
    changed, texts = (1, 4), make_texts()

    def steps(stage: StageModel, strategy: StrategyName) -> torch.Tensor:
        cache, blocks = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens)
        for segments in (FIRST, RAGGED):
            inputs = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in segments])
            computed = stage.forward(inputs, cache.plan(blocks.deal(segments)), strategy=strategy)
            for layer in changed if segments is FIRST else ():
                read_change(stage, layer, 4).apply()
        return computed

    expected = steps(load(role, model), "megatron")

    def body(collectives: SharedMemory) -> tuple[torch.Tensor, list[bool]]:
        stage = part(with_all(role), model, collectives)
        computed = steps(stage, "weight-gathered")
        forwards = [each.forward for each in stage.layers]
        return computed, [isinstance(each, SwitchedLayer) and each.parts_now() is not None for each in forwards]

    for computed, switching in together(3, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)
        assert [place for place, still in enumerate(switching) if not still] == list(changed)


@pytest.mark.parametrize("name", swept(sorted(SUPPORTED.keys() & ALL.keys() - SWITCHED), ["gemma2"]))
def test_other_models_run_megatron_whatever_is_asked(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    assert why_not_switched(name, role.format, "cpu") == f"layers of '{name}' do not go as Llama's dense ones do"
    expected = logits(model, stages=1)
    for computed, switched in of_ranks(model, 2, role, ["weight-gathered"]):
        assert switched == 0
        torch.testing.assert_close(computed, expected, rtol=0, atol=max(2 * TOLERANCE, tolerance(name)))


def test_weights_lie_once_however_many_read_them(tmp_path: Path) -> None:
    """What is shared is not held beside it: modules of all ranks look into one segment."""
    model = make_tiny_model(tmp_path, "llama", vocab_size=960, hidden_size=64, intermediate_size=512)
    [role] = roles(model, 1)

    def body(collectives: SharedMemory) -> tuple[int, int]:
        stage = part(with_all(role), model, collectives)
        before = collectives.shared_bytes
        stepped(stage, role, ["weight-gathered"])
        return before, collectives.shared_bytes

    shared = 4 * 6 * (64 * 64 + 3 * 64 * 512)  # output projections and MLPs
    for before, after in together(2, body):
        assert before == 0
        assert shared <= after <= 1.2 * shared + (4 << 20)
