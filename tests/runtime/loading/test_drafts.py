"""Laws of draft weights: a stage drafts as one that was loaded at the draft's bits computes, whatever its layers have been moved to."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.draft_weights import draft_bytes, has_draft
from strata_planner.contract.formats import ComputeType, FormatName, stored_bytes
from strata_planner.contract.frames import Segment
from strata_planner.contract.plan import Speculation
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.errors import InputError
from strata_runtime.formats import stored_bytes_of
from strata_runtime.loading.drafts import check_drafts
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS, growth_of, read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.prepare import differ_in_bits, same_weights
from strata_runtime.slot.role_cache import cache_of
from tests.laws import share, swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import load, roles
from tests.runtime.plans import even_plan

LAYERS = 2
SELF = Speculation("selfPrecision", 4)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=LAYERS)
    write_artefact(folder, layers=LAYERS)
    return folder


def role_of(model: Path, formats: Sequence[FormatName], wish: Speculation = SELF) -> Role:
    return structs.replace(roles(model, 1, formats=formats)[0], speculation=wish)


def logits(stage: StageModel, role: Role, *, draft: bool) -> torch.Tensor:
    segments = OwnBlocks(role.replica_page_budget, role.page_tokens).deal([Segment(0, 0, len(TOKENS), len(TOKENS))])
    return stage.forward(torch.tensor(TOKENS), cache_of(role, stage).plan(segments), draft=draft)


def expected(model: Path, bits: Sequence[int]) -> torch.Tensor:
    role = role_of(model, [FORMAT_OF_BITS[each] for each in bits], Speculation())
    return logits(load(role, model), role, draft=True)


@given(
    start=st.lists(st.sampled_from([3, 4, 6, 8, 16]), min_size=LAYERS, max_size=LAYERS),
    moves=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sampled_from([3, 4, 6, 8, 16])), max_size=5),
    draft_bits=st.sampled_from([3, 4]),
    mode=st.sampled_from(["selfPrecision", "selfPrecision", "auto"]),
)
@example([8, 16], [(0, 16), (0, 8), (0, 4), (0, 6), (1, 8)], 4, "selfPrecision")
@settings(max_examples=share(40), deadline=None)
def test_drafts_are_those_of_a_model_of_their_bits_after_any_moves(
    model: Path, start: list[int], moves: list[tuple[int, int]], draft_bits: int, mode: str
) -> None:
    wish = Speculation(mode, 4, draft_bits)  # type: ignore[arg-type]
    role = role_of(model, [FORMAT_OF_BITS[bits] for bits in start], wish)
    stage, bits = load(role, model), list(start)
    for layer, wanted in moves:
        growth, held = growth_of(stage, layer, wanted), _tensors(stage)
        change = read_change(stage, layer, wanted)
        change.apply()
        now = _tensors(stage)
        assert sum(now.values()) - sum(held.values()) == growth.net_bytes
        if wanted != bits[layer]:
            new = sum(now[place] for place in now.keys() - held.keys())
            assert new == growth.added_bytes, "what stays is not read again"
        change.release()
        bits[layer] = wanted
    drafting = [draft_bits if has_draft(FORMAT_OF_BITS[each], wish) else each for each in bits]
    assert torch.equal(logits(stage, role, draft=True), expected(model, drafting))
    assert torch.equal(logits(stage, role, draft=False), expected(model, bits))


@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["float32"]))
@pytest.mark.parametrize("name", ["any8", "any5", "any4", "any3", "int8"])
def test_what_drafting_takes_is_what_is_counted(model: Path, name: FormatName, compute_type: ComputeType) -> None:
    role = structs.replace(roles(model, 1, formats=[name] * LAYERS, compute_type=compute_type)[0], speculation=SELF)
    with_drafts, without = load(role, model), load(structs.replace(role, speculation=Speculation()), model)
    counted = sum(
        draft_bytes(name, int(linear.out_features), int(linear.in_features), compute_type, SELF)  # type: ignore[arg-type]
        for layer in range(LAYERS)
        for linear in without.linears(layer).values()
    )
    assert _bytes(with_drafts) - _bytes(without) == counted
    assert with_drafts.has_drafts == (name in {"any8", "any5"})


def test_a_16_bit_layer_drafts_with_planes_beside_its_weight(model: Path) -> None:
    role = role_of(model, ["dense"] * LAYERS)
    with_drafts, without = load(role, model), load(structs.replace(role, speculation=Speculation("auto")), model)
    counted = sum(
        stored_bytes("any4", int(linear.out_features), int(linear.in_features), "float32")  # type: ignore[arg-type]
        for layer in range(LAYERS)
        for linear in without.linears(layer).values()
    )
    assert _bytes(with_drafts) - _bytes(without) == counted
    assert not without.has_drafts


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_copy_a_16_bit_stage_makes_its_own_and_keeps_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = make_tiny_model(tmp_path / "alone", "llama", num_hidden_layers=LAYERS)
    role = role_of(alone, ["dense"] * LAYERS)
    first = load(role, alone, keep=keep)
    assert first.source is not None
    assert (first.source.artefact is not None) == keep
    again = load(role, alone, keep=keep)
    assert torch.equal(logits(first, role, draft=True), expected(model, [4] * LAYERS))
    assert torch.equal(logits(again, role, draft=True), logits(first, role, draft=True))


def test_a_replica_without_coarser_weights_is_refused_and_auto_does_without(model: Path) -> None:
    for mode, formats, drafts in (
        ("selfPrecision", ["any4", "int8"], False),
        ("selfPrecision", ["any4", "any5"], True),
        ("auto", ["any4", "dense"], False),
    ):
        plan = structs.replace(
            even_plan(model, ["s0", "s1"], formats=formats),  # type: ignore[arg-type]
            speculation=Speculation(mode),  # type: ignore[arg-type]
        )
        listed = [role for each in roles_of(plan).values() for role in each]
        assert [role.drafts for role in listed] == [drafts, drafts]
        if mode == "selfPrecision" and not drafts:
            with pytest.raises(InputError, match=r"no layer of replica 0 has planes of more bits \(this stage: any4\)"):
                check_drafts(listed[0])
        else:
            check_drafts(listed[0])


def test_a_copy_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=LAYERS)
    write_artefact(folder, layers=1)
    with pytest.raises(InputError, match="layer 1 is not there"):
        load(role_of(folder, ["dense"] * LAYERS), folder)
    load(role_of(folder, ["dense"] * LAYERS, Speculation("auto")), folder)


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "mixtral")
    role = role_of(folder, ["dense"] * 6)
    with pytest.raises(UnsupportedModelError):
        load(role, folder)


def test_weights_are_taken_over_where_drafts_are_the_same(model: Path) -> None:
    dense, planes = role_of(model, ["dense"] * LAYERS), role_of(model, ["any8"] * LAYERS)
    others = [
        Speculation(),
        Speculation("auto"),
        Speculation("suffix"),
        SELF,
        Speculation("selfPrecision", 2),
        Speculation("selfPrecision", 4, 3),
    ]

    def taken_over(role: Role) -> list[bool]:
        return [same_weights(role, structs.replace(role, speculation=wish)) for wish in others]

    assert taken_over(dense) == [False, False, False, True, True, False]
    assert taken_over(planes) == [False, True, False, True, True, False]
    assert taken_over(structs.replace(dense, speculation=Speculation())) == [True, True, True, False, False, False]
    assert differ_in_bits(dense, planes)
    assert not differ_in_bits(dense, structs.replace(planes, speculation=Speculation("auto")))


def _bytes(stage: StageModel) -> int:
    return sum(map(stored_bytes_of, stage.layers))


def _tensors(stage: StageModel) -> dict[int, int]:
    """Where each tensor of the stage lies -> its bytes."""
    return {
        tensor.data_ptr(): tensor.nbytes
        for layer in stage.layers
        for tensor in (*layer.parameters(), *layer.buffers())
        if tensor.nbytes
    }
