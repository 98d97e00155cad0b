"""Laws of calibrating activations: histograms of values alone, thresholds that clip what is rare, one entry for every linear."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.errors import InputError
from strata_runtime.formats.errors import ActivationNotFiniteError
from strata_runtime.formats.static8.activation_file import read_activations
from strata_runtime.loading.digest import model_digest
from strata_runtime.model.random_model import make_random_model
from strata_runtime.tools.calibration.activation_calibration import Recipe, calibrate_activations, main
from strata_runtime.tools.calibration.activation_histogram import BINS, MagnitudeHistogram, entropy_threshold, scale_of
from strata_runtime.tools.calibration.smoothing import best_smoothing, smoothing_factors
from tests.laws import share, swept

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return make_random_model(tmp_path_factory.mktemp("tiny"), "llama", **shapes, **heads)


def a_histogram(*batches: torch.Tensor) -> MagnitudeHistogram:
    histogram = MagnitudeHistogram()
    for batch in batches:
        histogram.add(batch)
    return histogram


def some(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def windows(count: int = 3, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (length,), generator=generator) for _ in range(count)]


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    seed=st.integers(0, 9),
)
@settings(max_examples=share(80), deadline=None)
def test_a_histogram_is_of_the_values_however_they_come(values: list[float], cuts: list[int], seed: int) -> None:
    whole = torch.tensor(values)
    mixed = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))]
    pieces = a_histogram(*mixed.tensor_split(sorted(cuts)))
    one = a_histogram(whole)
    assert one.counts.tolist() == pieces.counts.tolist()
    assert (one.width, one.peak) == (pieces.width, pieces.peak)
    assert one.counts.sum() == len(values)
    assert one.peak == 0 or one.width * BINS / 2 <= one.peak < one.width * BINS


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_refused(broken: float) -> None:
    with pytest.raises(ActivationNotFiniteError, match="1 of 3 activations are NaN or infinite"):
        a_histogram(torch.tensor([1.0, broken, 2.0]))


def test_entropy_clips_what_is_rare_and_keeps_what_is_common() -> None:
    common, outlier = some(100_000), torch.tensor([80.0])
    assert entropy_threshold(a_histogram(common, outlier)) < 10
    assert entropy_threshold(a_histogram(common)) > 2.5
    even = torch.linspace(-1, 1, 100_001)
    assert entropy_threshold(a_histogram(even)) > 0.95


@given(st.integers(1, 300), st.integers(0, 99), st.floats(0.001, 1000))
@settings(max_examples=share(30), deadline=None)
def test_a_threshold_lies_within_the_values_and_grows_with_them(count: int, seed: int, factor: float) -> None:
    values = some(count, seed)
    threshold = entropy_threshold(a_histogram(values))
    assert 0 < threshold <= float(values.abs().max())
    power = 2.0 ** round(torch.tensor(factor).log2().item())
    assert entropy_threshold(a_histogram(values * power)) == pytest.approx(threshold * power)


def test_inputs_that_are_always_zero_have_a_scale_that_divides() -> None:
    assert scale_of(entropy_threshold(a_histogram(torch.zeros(9)))) == 1.0


def test_factors_share_the_range_between_inputs_and_weights() -> None:
    inputs, weights = torch.tensor([8.0, 2.0, 0.0, 3.0]), torch.tensor([0.5, 2.0, 1.0, 0.0])
    factors = smoothing_factors(inputs, weights, 0.5)
    assert factors[2:].tolist() == [1.0, 1.0]
    assert float(factors[:2].log().mean()) == pytest.approx(0, abs=1e-6)
    assert float((inputs / factors / (weights * factors))[:2].log().diff()) == pytest.approx(0, abs=1e-5)
    assert torch.equal(smoothing_factors(torch.zeros(3), torch.ones(3), 0.5), torch.ones(3))


def test_smoothing_is_chosen_where_outliers_ask_for_it() -> None:
    inputs, weight = some(4000).view(50, 80), some(1600, 1).view(20, 80)
    inputs[:, 7] *= 60
    alpha, factors = best_smoothing(inputs, weight, inputs.abs().amax(dim=0), lambda histogram: histogram.peak)
    assert alpha is not None
    assert factors.argmax() == 7


@pytest.mark.parametrize("method", swept(["minmax", "entropy"], ["entropy"]))
@pytest.mark.parametrize("smoothing", swept([None, 0.5, "search"], [None, 0.5]))
def test_every_linear_gets_an_entry(model: Path, method: str, smoothing: float | str | None) -> None:
    done: list[tuple[int, int]] = []
    recipe = Recipe(method, smoothing)  # type: ignore[arg-type]
    found = calibrate_activations(model, windows(), recipe, lambda *progress: done.append(progress))
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert set(found.entries) == {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in (*names, *mlp)}
    assert done == [(1, 2), (2, 2)]
    for key, entry in found.entries.items():
        assert entry.scale > 0
        assert entry.smoothing.shape == (48 if "down_proj" in key else 32,)
        assert smoothing is not None or entry.smoothing.eq(1).all()


def test_minmax_is_the_largest_value_of_all_windows_whatever_their_order(model: Path) -> None:
    recipe = Recipe("minmax", None)
    first, second = (calibrate_activations(model, each, recipe) for each in (windows(), windows()[::-1]))
    assert {key: entry.scale for key, entry in first.entries.items()} == pytest.approx(
        {key: entry.scale for key, entry in second.entries.items()}, rel=1e-5
    )


def test_the_command_says_what_is_wrong(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--text", str(tmp_path / "absent.txt")]) == 2
    assert "calibration text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(model), "--text", "x", "--smoothing", "2"])


def test_the_command_calibrates_a_model_by_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = Path("examples/models/strata-tiny"), tmp_path / "activations.safetensors"
    wishes = ["--smoothing", "0.5", "--tokens", "128", "--window", "64", "--output", str(output)]
    assert main([str(model), "--text", str(model / "heldout.txt"), *wishes]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    found = read_activations(output, model_digest(model))
    assert dict(found.notes) == {"method": "minmax", "smoothing": "0.5", "tokens": "128"}
    assert len(found.entries) == 12 * 7


def test_what_is_written_is_read_for_this_model_alone(model: Path, tmp_path: Path) -> None:
    found = calibrate_activations(model, windows(1), Recipe("minmax", None))
    found.write(tmp_path / "activations.safetensors")
    assert read_activations(tmp_path / "activations.safetensors", model_digest(model)).notes["method"] == "minmax"
    with pytest.raises(InputError, match="of another model"):
        read_activations(tmp_path / "activations.safetensors", "0" * 64)
