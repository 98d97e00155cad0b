"""A stage that several ranks share computes what one alone does: any number of ranks, any format, every architecture whose cut is known."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from strata_planner.contract.architectures import UnsupportedModelError, mixer_of
from strata_planner.contract.divided import DIVIDED_FORMATS, check_divided
from strata_planner.contract.formats import STORED_FORMATS, FormatName
from strata_planner.contract.text_part import text_part
from strata_runtime.errors import InputError
from strata_runtime.formats.linear import PART_MAKERS, make_linear
from strata_runtime.formats.rounded.rounded_linear import WholeRowLinear
from strata_runtime.formats.static8.activation_file import ActivationEntry
from strata_runtime.formats.static8.static_linear import static_linear
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.precision_switch import read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.ranks.linears import SummedLinear
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.slot.role_cache import cache_of
from tests.laws import swept
from tests.runtime.architectures import ALL, make_tiny_model, tiny_config
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.float8_models import make_float8_model
from tests.runtime.loading.gptq_models import formats_of, make_gptq_model
from tests.runtime.loading.parity import FIRST, logits, make_texts
from tests.runtime.loading.shared import part, run, shared, shared_by_torch
from tests.runtime.loading.stages import CPU, Stages, roles
from tests.runtime.ranks.together import together

TOLERANCE = 2e-5  # of logits up to 20: sums in another order
# What the first tokens read of a state is normalised however small it is: one rank, too, is 2e-5 from what float64 computes.
OF_LINEAR_ATTENTION = 5e-5
KNOWN = sorted(ALL)


# Of the kinds of cut: biases that are added once and positions of all ranks, projections in one, whole experts beside a cut one, sinks, a norm over all heads,
# latent keys, value heads beside key heads that ranks share.
STANDING = ("opt", "phi3", "qwen2_moe", "gpt_oss", "olmo2", "deepseek_v3", "qwen3_next")
QUICK = ("phi3", "qwen2_moe", "deepseek_v3", "qwen3_next", "lfm2")
CASES = [(name, ranks) for name in KNOWN for ranks in (2, 3, 4)]


def tolerance(name: str) -> float:
    return (
        OF_LINEAR_ATTENTION if mixer_of(text_part(fields_of(name))["model_type"]) == "linear_attention" else TOLERANCE
    )


def fields_of(name: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    return {"model_type": ALL[name][0], **tiny_config(name)[1]}


@pytest.mark.parametrize("case", swept(CASES, [("llama", 2), *((name, 3) for name in QUICK)]))
def test_ranks_together_compute_what_one_does(case: tuple[str, int], tmp_path: Path) -> None:
    compute_what_one_does(case, shared, tmp_path)


@pytest.mark.parametrize("case", swept(CASES, [("qwen2_moe", 3), ("olmo2", 2)]))
def test_ranks_that_talk_by_torch_compute_what_one_does(case: tuple[str, int], tmp_path: Path) -> None:
    """By Gloo, with the code that NCCL runs under on GPUs: ragged steps of every architecture."""
    compute_what_one_does(case, shared_by_torch, tmp_path)


def compute_what_one_does(case: tuple[str, int], share: Callable[..., Any], folder: Path) -> None:
    """`share`: (model, ranks, role) -> the logits that each of them has."""
    name, ranks = case
    model = make_tiny_model(folder, name)
    [role] = roles(model, 1)
    expected = logits(model, stages=1)
    for computed in share(model, ranks, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", swept(["qwen3", "qwen3_next", "deepseek_v3", "lfm2"], ["qwen3"]))
def test_ranks_of_a_stage_in_the_middle_hand_on_what_one_would(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    listed = roles(model, 3)
    whole = Stages(model, listed)
    texts, role = make_texts(), listed[1]
    dealt = whole.blocks.deal(FIRST)
    inputs = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in FIRST])
    given = whole.models[0].forward(inputs, whole.caches[0].plan(dealt))
    expected = whole.models[1].forward(given, whole.caches[1].plan(dealt))

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage = part(role, model, collectives)
        return stage.forward(given, cache_of(role, stage).plan(dealt))

    for computed in together(2, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


FORMATS: list[Sequence[FormatName]] = [
    ("any4",) * 6,
    ("int8",) * 6,
    ("any3", "any8", "dense", "any5", "int8", "any6"),
]


@pytest.mark.parametrize("formats", swept(FORMATS, FORMATS[2:]), ids=["any4", "int8", "mixed"])
@pytest.mark.parametrize("source", swept(["quantized by the load", "read from the copy"], ["read from the copy"]))
@pytest.mark.parametrize("ranks", swept([2, 3], [3]))
def test_a_weight_is_the_same_however_many_share_it(
    formats: Sequence[FormatName], source: str, ranks: int, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, "llama", intermediate_size=200)
    if source == "read from the copy":
        write_artefact(model)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, ranks, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow  # the test of layers that change their bits has phi3
@pytest.mark.parametrize("name", swept(["phi3", "falcon-new-decoder", "lfm2", "qwen3_5"], ["phi3"]))
@pytest.mark.parametrize("source", swept(["quantized by the load", "read from the copy"], ["read from the copy"]))
def test_a_weight_that_is_several_in_one_is_the_same_however_many_share_it(
    name: str, source: str, tmp_path: Path
) -> None:
    formats: list[FormatName] = ["any4", "int8", "any3", "any8", "dense", "any4"]
    model = make_tiny_model(tmp_path, name)
    if source == "read from the copy":
        write_artefact(model)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, 3, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


EXPERTS = ["qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next", "lfm2_moe"]


@pytest.mark.parametrize("name", swept(EXPERTS, ["qwen2_moe"]))
def test_quantized_experts_go_whole_to_ranks(name: str, tmp_path: Path) -> None:
    formats: list[FormatName] = ["int8"] * 6
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, 3, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "mixtral", num_local_experts=2)
    [role] = roles(model, 1)
    with pytest.raises(InputError, match="3 ranks cannot share 2 experts"):
        together(3, lambda collectives: part(role, model, collectives))


@pytest.mark.slow  # slot/test_ranks.py over processes
@pytest.mark.parametrize("name", swept(["llama", "phi3", "lfm2", "qwen3_5"], ["phi3"]))
def test_layers_change_their_bits_on_all_ranks(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    write_artefact(model)
    before, after = (roles(model, 1, formats=(form,) * 6)[0] for form in ("any4", "any6"))  # type: ignore[arg-type]

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage = part(before, model, collectives)
        for layer in range(6):
            read_change(stage, layer, 6).apply()
        return run(stage, after)

    expected = logits(model, after.format, stages=1)
    for computed in together(3, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", swept(["llama", "phi3", "mixtral"], ["mixtral"]))
def test_a_rank_holds_its_part_alone(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name, vocab_size=960, hidden_size=64, intermediate_size=512)
    [role] = roles(model, 1)

    def bytes_of(stage: StageModel) -> int:
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in stage._stage.module.parameters()}
        return sum(weights.values())

    whole = bytes_of(load_stage(role, model, lambda *_: None, CPU))
    for held in together(2, lambda collectives: bytes_of(part(role, model, collectives))):
        assert held / whole == pytest.approx(0.5, abs=0.01)


def test_planners_are_told_what_can_be_cut() -> None:
    assert {*PART_MAKERS, *STORED_FORMATS, "w8a8_static"} == set(DIVIDED_FORMATS)
    for name in ALL:
        check_divided(fields_of(name))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("qwen3_next", {"linear_num_value_heads": 2}, "3 ranks cannot share 2 heads of linear attention"),
        ("qwen3_next", {"num_attention_heads": 2}, "3 ranks cannot share 2 heads"),
        ("lfm2", {"num_attention_heads": 2}, "3 ranks cannot share 2 heads"),
        ("deepseek_v3", {"num_attention_heads": 2, "num_key_value_heads": 2}, "3 ranks cannot share 2 heads"),
    ],
)
def test_more_ranks_than_heads_are_refused(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name, **fields)
    [role] = roles(model, 1)
    with pytest.raises(InputError, match=said):
        together(3, lambda collectives: part(role, model, collectives))


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}  # heads of 32: whole groups of few bits
WIDTHS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"v_head_dim": 32, "n_shared_experts": 4},
    "qwen3_next": {"head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 96},
    "lfm2": {"block_multiple_of": 32},
}


@pytest.mark.slow  # the test of a weight has other formats
@pytest.mark.parametrize("formats", [("int4", "int3", "fp8_e4m3") * 2], ids=["mixed"])
@pytest.mark.parametrize("name", swept(["llama", "phi3", "olmo2", *WIDTHS], ["phi3"]))
@pytest.mark.parametrize("ranks", swept([2, 3], [3]))
def test_rounded_weights_are_the_same_however_many_share_them(
    formats: Sequence[FormatName], name: str, ranks: int, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, name, **WIDE | WIDTHS.get(name, {}))
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, ranks, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied-bias"])
def test_a_head_of_8_bits_is_the_same_however_many_share_it(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    role = structs.replace(roles(model, 1)[0], head_format="int8")
    expected = run(load_stage(role, model, lambda *_: None, CPU), role)
    for computed in shared(model, 3, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


def test_groups_of_few_bits_are_cut_between_groups_alone(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    [role] = roles(model, 1, formats=("int4",) * 6)
    with pytest.raises(InputError, match=r"inputs \d+ to \d+ begin or end within a group of 32"):
        together(2, lambda collectives: part(role, model, collectives))


GPTQ = ["phi3", "llama", "lfm2", "qwen3_5_text"]
FLOAT8 = ["phi3", "qwen2_moe", "deepseek_v3", "glm4_moe_lite", "lfm2", "qwen3_next"]


@pytest.mark.parametrize(
    "case",
    swept([f"gptq {name}" for name in GPTQ] + [f"fp8_block {name}" for name in FLOAT8], ["fp8_block phi3"]),
)
@pytest.mark.parametrize("ranks", swept([2, 3], [3]))
def test_what_a_checkpoint_holds_quantized_is_the_same_however_many_share_it(
    case: str, ranks: int, tmp_path: Path
) -> None:
    method, name = case.split()
    plain, model = make_tiny_model(tmp_path / "plain", name), tmp_path / "quantized"
    if method == "gptq":
        make_gptq_model(plain, model, {"group_size": 16, "dynamic": {r".*\.2\.": {"bits": 8}}})
    else:
        make_float8_model(plain, model)
    for formats in (formats_of(model), ["dense"] * 6):
        [role] = roles(model, 1, formats=formats)
        expected = logits(model, formats, stages=1)
        for computed in shared(model, ranks, role):
            torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


def test_inputs_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "gptq"
    make_gptq_model(make_tiny_model(tmp_path / "plain", "llama"), model, {"desc_act": True})
    [role] = roles(model, 1, formats=formats_of(model))
    with pytest.raises(InputError, match=r"_proj: its inputs are grouped in an order of their own \(desc_act\)"):
        together(2, lambda collectives: part(role, model, collectives))
    with pytest.raises(UnsupportedModelError, match="desc_act"):
        check_divided(json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_whole_however_many_share_their_values(dtype: torch.dtype) -> None:
    """`w8a8` of some inputs: the largest value of a row is on one rank, and every rank rounds by it."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator) for shape in ((96, 192), (5, 192)))
    rows = (rows * torch.logspace(-2, 2, 192)).to(dtype)
    expected = make_linear(weight, None, "w8a8", dtype)(rows)
    ends = (0, 64, 160, 192)

    def body(collectives: SharedMemory) -> torch.Tensor:
        first, last = ends[collectives.rank : collectives.rank + 2]
        linear = make_linear(weight, None, "w8a8", dtype, columns=(first, last))
        assert isinstance(linear, WholeRowLinear)
        summed = SummedLinear(linear, collectives)
        linear.largest = summed.largest
        return summed(rows[:, first:last])

    for computed in together(3, body):
        # What each rank has computed is rounded before it is added up.
        rounded = 1e-6 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(computed, expected, rtol=0, atol=float(expected.abs().max()) * rounded)


def test_inputs_are_smoothed_and_rounded_the_same_however_many_share_them() -> None:
    """`w8a8_static`: nothing of a row decides how it is rounded."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator) for shape in ((96, 192), (5, 192)))
    entry = ActivationEntry(0.04, torch.rand(192, generator=generator) + 0.5)
    expected = static_linear(weight, None, entry, torch.float32)(rows)
    parts = [(0, 64), (64, 160), (160, 192)]
    cut = [static_linear(weight, None, entry, torch.float32, columns=each)(rows[:, slice(*each)]) for each in parts]
    torch.testing.assert_close(torch.stack(cut).sum(0), expected, rtol=1e-5, atol=1e-4)


def test_w8a8_is_computed_alike_on_every_rank(tmp_path: Path) -> None:
    """To the last bit; beside one rank, a value at the edge of two codes may fall to the other."""
    model = make_tiny_model(tmp_path, "llama")
    [role] = roles(model, 1, formats=("w8a8",) * 6)
    first, *others = shared(model, 3, role)
    assert all(torch.equal(first, other) for other in others)
    assert (first - logits(model, ("w8a8",) * 6, stages=1)).abs().mean() < 0.02


def test_a_format_that_is_not_cut_is_refused_with_those_that_are(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    [role] = roles(model, 1, formats=("any4_a8",) * 6)
    with pytest.raises(InputError, match=r"dense, int8, w8a8, .*, not in any4_a8"):
        together(2, lambda collectives: part(role, model, collectives))
