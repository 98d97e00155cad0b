"""Layers in one native call compute to the bit what their modules compute one by one, and are taken wherever they can be."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from strata_planner.contract.formats import FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import StrategyName
from strata_planner.question.model import Model
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.kernels import native_channels, native_dense, native_layer
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.fused_layer import FusedLayer
from strata_runtime.ranks import shared_memory
from strata_runtime.ranks.collectives import Collectives, RankLostError
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.shared import part
from tests.runtime.loading.stages import Stages, roles
from tests.runtime.ranks.together import together

pytestmark = pytest.mark.skipif(not native_dense.runs(), reason="this processor has no such kernels")
quick_bytes = pytest.mark.skipif(not native_channels.fast(), reason="torch multiplies bytes here, module by module")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}  # as the library takes heads and blocks
TEXTS = {number: torch.arange(40) * (5 + number) % 90 for number in range(1, 6)}
STEPS: Sequence[Sequence[Segment]] = (
    [Segment(1, 0, 9, 0), Segment(2, 0, 4, 1)],
    [Segment(1, 9, 1, 1), Segment(2, 4, 1, 1), Segment(3, 0, 3, 1)],  # five rows, padded to six
    [Segment(1, 10, 1, 1)],
    [Segment(4, 0, 20, 0), Segment(2, 5, 1, 1)],
    [Segment(4, 20, 5, 5), Segment(1, 11, 4, 4), Segment(3, 3, 1, 1)],  # drafts that are verified
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each call of the library: tokens, layers."""
    seen: list[tuple[int, int]] = []
    original = native_layer.layers

    def layers(hidden: torch.Tensor, step: native_layer.Step, named: bytes, *rest: Any) -> torch.Tensor:
        seen.append((step.tokens, len(named) // native_layer.LAYER_BYTES))
        return original(hidden, step, named, *rest)

    monkeypatch.setattr(native_layer, "layers", layers)
    return seen


def run(model: Path, formats: Sequence[FormatName], kv_bits: int) -> list[torch.Tensor]:
    listed = roles(model, 2, compute_type="bfloat16", formats=formats)
    stages = Stages(model, [structs.replace(each, kv_bits=kv_bits) for each in listed])
    return [stages.step(TEXTS, segments) for segments in STEPS]


def through_steps(stage: StageModel, role: Role) -> list[torch.Tensor]:
    """What one rank's stage makes of each of the steps."""
    cache, blocks = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens)
    return [
        stage.forward(torch.cat([TEXTS[s.sequence][s.start : s.start + s.length] for s in segments]), batch)
        for segments in STEPS
        for batch in [cache.plan(blocks.deal(segments))]
    ]


@pytest.mark.parametrize(
    ("name", "form", "kv_bits", "config"),
    [
        ("llama", "dense", 16, {}),
        pytest.param("llama", "int8", 8, {}, marks=pytest.mark.slow),
        pytest.param("llama", "any3", 8, {}, marks=pytest.mark.slow),
        pytest.param("llama", "any8", 16, {}, marks=pytest.mark.slow),
        pytest.param("llama", "any4_a8", 16, {}, marks=pytest.mark.slow),
        pytest.param("llama", "w8a8", 16, {"attention_bias": True}, marks=quick_bytes),
        pytest.param("llama", "dense", 16, {"attention_bias": True, "mlp_bias": True}, marks=pytest.mark.slow),
        ("mistral", "any5", 16, {"sliding_window": 4}),
        pytest.param("qwen2", "any4", 16, {}, marks=pytest.mark.slow),  # biases of queries, keys and values
        ("qwen2", "int8", 16, {}),
        ("qwen3", "dense", 16, {}),  # norms of queries and keys
    ],
)
def test_one_call_is_the_modules_one_by_one(
    name: str,
    form: FormatName,
    kv_bits: int,
    config: dict[str, Any],
    tmp_path: Path,
    taken: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_tiny_model(tmp_path, name, **WIDE, **config)
    layers = [form] * Model.from_folder(model).num_layers
    found = run(model, layers, kv_bits)
    assert [tokens for tokens, _ in taken] == [tokens for tokens in (13, 5, 1, 21, 10) for _stage in range(2)]
    assert sum(count for _, count in taken) == len(STEPS) * len(layers)
    monkeypatch.setattr(native_layer, "MOST_TOKENS", 0)
    expected = run(model, layers, kv_bits)
    assert len(taken) == len(STEPS) * 2, "the modules were asked"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_the_next_step_sees_what_has_changed(
    tmp_path: Path, taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What linears are called by is kept from step to step: until one has other bits, another's place, drafts, or somebody looks at it."""
    model = make_tiny_model(tmp_path, "llama", **WIDE)
    layers: list[FormatName] = ["any5"] * Model.from_folder(model).num_layers
    stages = Stages(model, roles(model, 1, compute_type="bfloat16", formats=layers))
    (stage,) = stages.models
    tokens, dealt = TEXTS[1][:6], stages.blocks.deal([Segment(1, 0, 6, 1)])
    key, linear = next((key, each) for key, each in stage.linears(0).items() if key.endswith("up_proj"))
    assert isinstance(linear, AnyLinear)
    outputs: list[torch.Tensor] = []

    def changes(*, draft: bool = False) -> None:
        calls, (cache,) = len(taken), stages.caches
        fused = stage.forward(tokens, cache.plan(dealt), draft=draft)
        assert taken[calls:] == [(6, len(layers))]
        with monkeypatch.context() as patch:
            patch.setattr(native_layer, "MOST_TOKENS", 0)
            assert torch.equal(fused, stage.forward(tokens, cache.plan(dealt), draft=draft))
        assert not any(torch.equal(fused, each) for each in outputs)
        outputs.append(fused)

    def values(count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        return (torch.randn(linear.out_features, count, generator=generator) / 8).bfloat16()

    draft = AnyLinear(linear.with_bits(3, values(8).sort(dim=1).values), None)
    changes()
    linear.set_bits(4, values(16).sort(dim=1).values)
    changes()
    stage.replace(0, key, BlockedLinear(values(linear.in_features), None))
    changes()
    stage.set_draft(0, key, draft)
    changes(draft=True)
    (cache,) = stages.caches
    assert torch.equal(stage.forward(tokens, cache.plan(dealt)), outputs[-2])
    stage.set_draft(0, key, None)
    seen: list[int] = []
    hook = stage.linears(0)[key].register_forward_hook(lambda *_: seen.append(1))
    calls = len(taken)
    looked_at = stage.forward(tokens, cache.plan(dealt))
    hook.remove()
    assert (len(seen), taken[calls:]) == (1, [(6, 1)] * (len(layers) - 1)), (
        "layers go one by one, and this one's linears do"
    )
    assert torch.equal(looked_at, outputs[-2])


def test_a_copy_of_a_layer_multiplies_by_its_own_weights(tmp_path: Path, taken: list[tuple[int, int]]) -> None:
    model = make_tiny_model(tmp_path, "llama", **WIDE)
    layers: list[FormatName] = ["dense"] * Model.from_folder(model).num_layers
    stages = Stages(model, roles(model, 1, compute_type="bfloat16", formats=layers))
    stages.step(TEXTS, [Segment(1, 0, 6, 1)])
    forward = vars(stages.models[0].layers[0])["forward"]
    of_copy = vars(copy.deepcopy(stages.models[0].layers[0]))["forward"]
    fused, copied = forward.func.__self__, of_copy.func.__self__
    assert taken
    assert fused._products(6) != copied._products(6), "addresses of other weights"
    decoder = vars(stages.models[0]._stage._base)["forward"].func.__self__
    assert decoder._runs
    assert not copy.deepcopy(decoder)._runs


class Running:
    """One stage of a tiny model, and what it makes of six tokens."""

    def __init__(self, folder: Path) -> None:
        model = make_tiny_model(folder, "llama", **WIDE, num_hidden_layers=4)
        self.role = roles(model, 1, compute_type="bfloat16", formats=["dense"] * 4)[0]
        stages = Stages(model, [self.role])
        self.stage, self.cache = stages.models[0], stages.caches[0]
        self.dealt = stages.blocks.deal([Segment(1, 0, 6, 1)])

    def step(self) -> torch.Tensor:
        return self.stage.forward(TEXTS[1][:6], self.cache.plan(self.dealt))

    def layers(self, some: range, hidden: torch.Tensor) -> torch.Tensor:
        return self.stage.forward_some(hidden, self.cache.plan(self.dealt), some)


def test_who_looks_at_the_ends_sees_them_and_between_two_layers_they_go_one_by_one(
    tmp_path: Path, taken: list[tuple[int, int]]
) -> None:
    running = Running(tmp_path)
    layers, expected = running.stage.layers, running.step()
    seen: list[torch.Tensor] = []
    ends = [
        layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])),
        layers[-1].register_forward_hook(lambda *given: seen.append(given[2])),
    ]
    assert torch.equal(running.step(), expected)
    assert taken == [(6, 4)] * 2
    between = layers[1].register_forward_hook(lambda *given: seen.append(given[2]))
    assert torch.equal(running.step(), expected)
    assert taken[2:] == [(6, 1)] * 4
    between.remove()
    assert torch.equal(running.step(), expected)
    assert taken[6:] == [(6, 4)], "nobody looks any more"
    for end in ends:
        end.remove()
    entered, left, entered_again, _, left_again, *_ = seen
    assert torch.equal(entered, entered_again)
    assert torch.equal(left, left_again)
    assert not torch.equal(entered, left)
    assert running.stage.layers_begun == 4 * 4


def test_another_cache_gets_the_keys_of_its_own_steps(tmp_path: Path, taken: list[tuple[int, int]]) -> None:
    running = Running(tmp_path)
    expected, first = running.step(), running.cache
    running.cache = cache_of(running.role, running.stage)
    assert torch.equal(running.step(), expected)
    assert taken == [(6, 4)] * 2
    for number, pool in running.cache.pools.items():
        assert torch.equal(pool.storage[0], first.pools[number].storage[0])
        assert pool.storage[0].any()


def test_some_layers_alone_are_those_and_no_others(
    tmp_path: Path, taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(tmp_path)
    hidden = torch.randn(6, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    parts = [range(1, 2), range(2, 3), range(1, 3), range(1, 4)]
    whole, fused = running.step(), [running.layers(some, hidden) for some in parts]
    assert torch.equal(running.step(), whole)
    assert taken == [(6, each) for each in (4, 1, 1, 2, 3, 4)]
    monkeypatch.setattr(native_layer, "MOST_TOKENS", 0)
    for some, found in zip(parts, fused, strict=True):
        assert torch.equal(running.layers(some, hidden), found)


@pytest.mark.parametrize(
    ("name", "ranks", "form", "config"),
    [
        ("llama", 2, "dense", {}),
        ("llama", 3, "any4", {"attention_bias": True, "mlp_bias": True}),  # biases of what is added up: once
        pytest.param("qwen3", 2, "int8", {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_add_up_within_the_call(
    name: str,
    ranks: int,
    form: FormatName,
    config: dict[str, Any],
    tmp_path: Path,
    taken: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And meet those that go module by module, as a rank may whose part the library does not take."""
    model = make_tiny_model(tmp_path, name, **WIDE, num_hidden_layers=2, num_attention_heads=4, **config)
    [role] = roles(model, 1, compute_type="bfloat16", formats=[form] * 2)

    def steps(collectives: Collectives) -> list[torch.Tensor]:
        stage = part(role, model, collectives)
        if collectives.rank in apart:
            stage.layers[0].register_forward_hook(lambda *_: None)
            for linear in stage.linears(1).values():
                linear.register_forward_hook(lambda *_: None)
        return through_steps(stage, role)

    apart: set[int] = set()
    found = together(ranks, steps)
    assert sorted(taken) == sorted((tokens, 2) for tokens in (13, 5, 1, 21, 10) for _rank in range(ranks))
    apart = {0}
    mixed = together(ranks, steps)
    assert sum(layers for _, layers in taken) == 2 * ranks * 5 + 2 * (ranks - 1) * 5 + 5
    monkeypatch.setattr(native_layer, "MOST_TOKENS", 0)
    alone = together(ranks, steps)
    for each in (found, mixed, alone):
        for step in zip(*each, *found, strict=True):
            assert all(torch.equal(one, step[0]) for one in step[1:])


def test_a_rank_that_does_not_come_ends_the_step(tmp_path: Path, taken: list[tuple[int, int]]) -> None:
    model = make_tiny_model(tmp_path, "llama", **WIDE)
    [role] = roles(model, 1, compute_type="bfloat16", formats=["dense"] * Model.from_folder(model).num_layers)

    def steps(collectives: Collectives) -> str:
        stage = part(role, model, collectives)
        if collectives.rank:
            return ""
        assert stage.layers_begun == 0
        cache, blocks = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens)
        batch = cache.plan(blocks.deal([Segment(1, 0, 6, 1)]))
        hidden = torch.zeros(6, 128, dtype=torch.bfloat16)
        with pytest.raises(RankLostError) as lost:
            stage.forward_some(hidden, batch, range(1, 3))
        assert stage.layers_begun == 1, "counted as they are begun"
        return str(lost.value)

    why, _ = together(2, steps, patience=0.2)
    assert "rank 1 of 2 did not come to a collective within 0.2 s" in why
    assert taken == [(6, 2)]


@pytest.mark.parametrize("apart", [0, 1])
def test_ranks_meet_as_often_whichever_way_they_go(
    apart: int, tmp_path: Path, taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of several pieces, some of padded rows alone; and an embedding once, where only one of the ranks finds out behind it that layers go one by one."""
    monkeypatch.setattr(shared_memory, "BUFFER_BYTES", 512)
    model = make_tiny_model(tmp_path, "llama", **WIDE)
    [role] = roles(model, 1, compute_type="bfloat16", formats=["dense"] * Model.from_folder(model).num_layers)
    own = FusedLayer.step

    def steps(collectives: SharedMemory) -> tuple[list[torch.Tensor], int]:
        stage = part(role, model, collectives)
        alone = {id(vars(each)["forward"].func.__self__) for each in stage.layers if collectives.rank == apart}
        refusing.update(alone)
        return through_steps(stage, role), collectives._meeting.value

    refusing: set[int] = set()
    monkeypatch.setattr(FusedLayer, "step", lambda layer, *given: None if id(layer) in refusing else own(layer, *given))
    (found, met), (others, met_by_others) = together(2, steps)
    assert met == met_by_others
    assert taken, "the other rank"
    for one, other in zip(found, others, strict=True):
        assert torch.equal(one, other)


def test_decoding_is_one_call_while_ranks_run_megatron(tmp_path: Path, taken: list[tuple[int, int]]) -> None:
    model = make_tiny_model(tmp_path, "llama", **WIDE)
    count = Model.from_folder(model).num_layers
    [role] = roles(model, 1, compute_type="bfloat16", formats=["dense"] * count)
    switching = structs.replace(role, strategies=((1, "megatron"), (2, "weight-gathered")))
    turns: Sequence[StrategyName] = ("megatron", "weight-gathered", "projection-replicated", "megatron")

    def steps(collectives: SharedMemory) -> list[torch.Tensor]:
        stage = part(switching, model, collectives)
        cache, blocks = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens)
        batches = [cache.plan(blocks.deal([Segment(1, 0, 6, 1)])) for _ in turns]
        return [
            stage.forward(TEXTS[1][:6], batch, strategy=strategy)
            for batch, strategy in zip(batches, turns, strict=True)
        ]

    for computed in together(2, steps):
        assert torch.equal(computed[0], computed[3])
        for other in computed[1:3]:
            torch.testing.assert_close(other, computed[0], rtol=0, atol=0.1)
    assert taken == [(6, count)] * 4, "two ranks, twice"
