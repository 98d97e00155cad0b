"""Laws of a layer that moves to other bits: it equals one that was loaded so, by whatever way it came; what is refused or fails changes nothing."""

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ANY_PRECISION, ComputeType, FormatName
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, Recipe
from strata_runtime.errors import InputError
from strata_runtime.formats import stored_bytes_of
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS, format_of, growth_of, read_change, role_after
from strata_runtime.loading.stage_model import StageModel
from tests.laws import share, swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import load, roles

torch.set_num_threads(1)

LAYERS = 2
BITS = sorted(FORMAT_OF_BITS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=LAYERS)
    write_artefact(folder, layers=LAYERS)
    return folder


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def stage_of(model: Path, *formats: FormatName, compute_type: ComputeType = "float32") -> StageModel:
    chosen = formats or ("any8",) * LAYERS
    return load(roles(model, 1, compute_type=compute_type, formats=chosen)[0], model)


@cache
def fresh(model: Path, bits: int, compute_type: ComputeType) -> StageModel:
    return stage_of(model, *[FORMAT_OF_BITS[bits]] * LAYERS, compute_type=compute_type)


def outputs(stage: StageModel, layer: int) -> dict[str, torch.Tensor]:
    """What each linear makes of the same inputs."""
    generator = torch.Generator().manual_seed(layer)
    with torch.inference_mode():
        return {
            key: linear(torch.randn(3, int(linear.in_features), generator=generator).to(stage.dtype))
            for key, linear in stage.linears(layer).items()
        }


def move(stage: StageModel, layer: int, bits: int) -> None:
    change = read_change(stage, layer, bits)
    change.apply()
    change.release()


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)


@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["bfloat16"]))
@given(
    moves=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sampled_from(BITS)), max_size=6),
    start=st.sampled_from(BITS),
)
@settings(max_examples=share(12), deadline=None)
def test_after_any_moves_each_layer_is_one_loaded_at_its_bits(
    model: Path, compute_type: ComputeType, moves: list[tuple[int, int]], start: int
) -> None:
    stage = stage_of(model, *[FORMAT_OF_BITS[start]] * LAYERS, compute_type=compute_type)
    bits = [start] * LAYERS
    for layer, wanted in moves:
        move(stage, layer, wanted)
        bits[layer] = wanted
        for each, held in enumerate(bits):
            assert_equal(outputs(stage, each), outputs(fresh(model, held, compute_type), each))
            assert {format_of(linear) for linear in stage.linears(each).values()} == {FORMAT_OF_BITS[held]}


@pytest.mark.parametrize("name", swept(["opt", "gpt_neox", "qwen2", "phi3"], ["gpt_neox"]))
def test_biases_and_fused_linears_move_as_they_are_loaded(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / name, name)
    write_artefact(folder, layers=1)
    start: list[FormatName] = ["any8", *["dense"] * 5]
    stage = load(roles(folder, 6, formats=start)[0], folder)
    for bits in (3, 16, 6):
        move(stage, 0, bits)
        expected = load(roles(folder, 6, formats=[FORMAT_OF_BITS[bits], *start[1:]])[0], folder)
        assert_equal(outputs(stage, 0), outputs(expected, 0))


@pytest.mark.parametrize("bits", sorted(ANY_PRECISION))
def test_down_and_up_again_is_the_same_bytes_and_what_stays_is_not_copied(model: Path, bits: int) -> None:
    stage = stage_of(model)
    before = {key: linear.stored for key, linear in stage.linears(0).items() if isinstance(linear, AnyLinear)}
    move(stage, 0, bits)
    move(stage, 0, 8)
    for key, linear in stage.linears(0).items():
        assert isinstance(linear, AnyLinear)
        assert all(torch.equal(*pair) for pair in zip(linear.stored.planes, before[key].planes, strict=True))
        assert torch.equal(linear.stored.table, before[key].table)
        kept = [plane.data_ptr() for plane in before[key].planes[:bits]]
        assert [plane.data_ptr() for plane in linear.stored.planes[:bits]] == kept


@pytest.mark.parametrize("before", swept(BITS, [3, 8, 16]))
@pytest.mark.parametrize("after", swept(BITS, [4, 16]))
def test_the_growth_that_is_told_is_that_of_the_modules(model: Path, before: int, after: int) -> None:
    stage = stage_of(model, *[FORMAT_OF_BITS[before]] * LAYERS)
    growth, held = growth_of(stage, 0, after), stored(stage)
    move(stage, 0, after)
    assert stored(stage) - held == growth.net_bytes
    assert growth.added_bytes >= 0
    assert growth.returned_bytes >= 0
    if after == before:
        assert growth.added_bytes == growth.returned_bytes == 0


def test_a_blocked_weight_passes_as_it_was_read_one_linear_at_a_time(model: Path) -> None:
    blocked, plain = stage_of(model, compute_type="bfloat16"), stage_of(model)
    weights = [int(linear.in_features) * int(linear.out_features) for linear in plain.linears(0).values()]
    passing = 2 * max(weights) if isinstance(fresh(model, 16, "bfloat16").linears(0).popitem()[1], BlockedLinear) else 0
    assert growth_of(blocked, 0, 16).peak_bytes == 2 * sum(weights) + passing
    assert growth_of(plain, 0, 16).peak_bytes == 4 * sum(weights)


def stored(stage: StageModel) -> int:
    return sum(stored_bytes_of(linear) for linear in stage.linears(0).values())


def test_the_role_tells_the_new_bits_and_bytes(model: Path) -> None:
    stage, role = stage_of(model), roles(model, 1, formats=["any8"] * LAYERS)[0]
    change = read_change(stage, 1, 3)
    after = role_after(role, change)
    assert after.bits == (8, 3)
    assert after.format == ("any8", "any3")
    assert after.predicted_bytes - role.predicted_bytes == change.growth.net_bytes < 0


def test_nothing_changes_before_it_is_applied(model: Path) -> None:
    stage = stage_of(model)
    expected = outputs(stage, 0)
    read_change(stage, 0, 3)
    read_change(stage, 0, 16)
    assert_equal(outputs(stage, 0), expected)


def test_sixteen_bits_on_a_processor_that_multiplies_bfloat16_are_blocked_as_after_a_load(model: Path) -> None:
    stage = stage_of(model, compute_type="bfloat16")
    move(stage, 0, 16)
    kinds = {type(linear) for linear in stage.linears(0).values()}
    assert kinds == {type(linear) for linear in fresh(model, 16, "bfloat16").linears(0).values()}
    assert kinds <= {BlockedLinear, torch.nn.Linear}


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "w8a8"])
def test_layers_rounded_to_nearest_do_not_move(model: Path, name: FormatName) -> None:
    stage = stage_of(model, name, "any4")
    expected = outputs(stage, 0)
    with pytest.raises(InputError, match=f"layer 0 is stored in {name}.*any-precision formats"):
        read_change(stage, 0, 4)
    assert_equal(outputs(stage, 0), expected)
    move(stage, 1, 3)


def test_fused_experts_hold_their_layers_at_16_bits(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "mixtral", "mixtral")
    write_artefact(folder, layers=1)
    stage = load(roles(folder, 6)[0], folder)
    with pytest.raises(UnsupportedModelError, match="fused experts"):
        read_change(stage, 0, 4)


@pytest.mark.parametrize("bits", [2, 9, 12, 17])
def test_bits_that_no_layer_can_have_are_refused(model: Path, bits: int) -> None:
    with pytest.raises(InputError, match=f"{bits} bits; a layer moves among 3, 4, 5, 6, 7, 8, 16"):
        read_change(stage_of(model), 0, bits)


def test_without_a_copy_the_refusal_says_how_to_make_one_and_16_bits_are_reached(damaged: Path) -> None:
    shutil.rmtree(damaged / ANY_PRECISION_FOLDER)
    stage = stage_of(damaged, "any4", "dense")
    with pytest.raises(InputError, match=f"run `strata quantize {damaged}`"):
        read_change(stage, 1, 4)
    move(stage, 0, 16)
    assert_equal(outputs(stage, 0), outputs(fresh(damaged, 16, "float32"), 0))


def test_a_copy_made_after_a_dense_stage_was_loaded_is_found(damaged: Path) -> None:
    shutil.rmtree(damaged / ANY_PRECISION_FOLDER)
    stage = stage_of(damaged, "dense", "dense")
    write_artefact(damaged, layers=LAYERS)
    move(stage, 0, 4)
    assert_equal(outputs(stage, 0), outputs(fresh(damaged, 4, "float32"), 0))


def test_planes_of_a_copy_made_anew_are_not_mixed_with_those_held(damaged: Path) -> None:
    stage = stage_of(damaged)
    write_artefact(damaged, recipe=Recipe(seed_bits=4), layers=LAYERS)
    with pytest.raises(InputError, match="they were made anew; load the model again"):
        read_change(stage, 0, 4)


def test_a_file_that_is_cut_off_leaves_the_layer_as_it_was(damaged: Path) -> None:
    stage = stage_of(damaged, "any4", "any4")
    expected = outputs(stage, 0)
    file = damaged / ANY_PRECISION_FOLDER / "any-00000.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(InputError, match="any-00000"):
        read_change(stage, 0, 8)
    assert_equal(outputs(stage, 0), expected)
    move(stage, 1, 8)
