"""A stage that several ranks share computes what one alone does: any number of ranks, any format, every architecture whose cut is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.divided import DIVIDED, DIVIDED_FORMATS, check_divided
from strata_planner.contract.formats import FormatName
from strata_planner.contract.roles import Role
from strata_planner.contract.text_part import text_part
from strata_runtime.errors import InputError
from strata_runtime.formats.linear import PART_MAKERS
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.precision_switch import read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.laws import swept
from tests.runtime.architectures import ALL, make_tiny_model, tiny_config
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.parity import FIRST, RAGGED, logits, make_texts
from tests.runtime.loading.stages import CPU, Stages, roles
from tests.runtime.ranks.together import together

TOLERANCE = 2e-5  # of logits up to 20: sums in another order
REFUSED = {"deepseek_v3": "latent", "lfm2": "conv", "qwen3_next": "linear_attn"}
ALIKE = {  # refused for the same reason
    "deepseek_v3-one-query": "latent",
    "glm4_moe_lite": "latent",
    "lfm2-bias": "conv",
    "lfm2_moe": "conv",
    "qwen3_5": "linear_attn",
    "qwen3_5_moe": "linear_attn",
    "qwen3_5_moe_text": "linear_attn",
    "qwen3_5_text": "linear_attn",
}
KNOWN = sorted(ALL.keys() - REFUSED.keys() - ALIKE.keys())


def part(role: Role, model: Path, collectives: SharedMemory) -> StageModel:
    return load_stage(role, model, lambda *_: None, CPU, LoadOptions(collectives=collectives))


def shared(model: Path, ranks: int, role: Role) -> list[torch.Tensor]:
    """The logits of the ragged batch, from each rank."""

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage = part(role, model, collectives)
        return run(stage, role)

    return together(ranks, body)


def run(stage: StageModel, role: Role) -> torch.Tensor:
    cache, blocks, texts = cache_of(role, stage), OwnBlocks(role.replica_page_budget, role.page_tokens), make_texts()
    for segments in (FIRST, RAGGED):
        inputs = torch.cat([texts[s.sequence][s.start : s.start + s.length] for s in segments])
        computed = stage.forward(inputs, cache.plan(blocks.deal(segments)))
    return computed


# One of each kind of cut: plain, biases that are added once, positions of all ranks, projections in one, by key heads, whole experts beside a cut one, sinks, a
# norm over all heads, a norm for each.
STANDING = (
    "llama-tied-bias",
    "opt",
    "phi3",
    "bloom",
    "falcon-new-decoder",
    "qwen2_moe",
    "gpt_oss",
    "olmo2",
    "stablelm",
)


CASES = [(name, ranks) for name in KNOWN for ranks in (2, 3, 4)]


@pytest.mark.parametrize("case", swept(CASES, [("llama", 2), ("llama", 4), *((name, 3) for name in STANDING)]))
def test_ranks_together_compute_what_one_does(case: tuple[str, int], tmp_path: Path) -> None:
    name, ranks = case
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    expected = logits(model, stages=1)
    for computed in shared(model, ranks, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


def test_ranks_of_a_stage_in_the_middle_hand_on_what_one_would(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen3")
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
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


FORMATS: list[Sequence[FormatName]] = [
    ("any4",) * 6,
    ("int8",) * 6,
    ("any3", "any8", "dense", "any5", "int8", "any6"),
]


@pytest.mark.parametrize("formats", FORMATS, ids=["any4", "int8", "mixed"])
@pytest.mark.parametrize("source", ["quantized by the load", "read from the copy"])
@pytest.mark.parametrize("ranks", [2, 3])
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


@pytest.mark.parametrize("name", ["phi3", "falcon-new-decoder"])
@pytest.mark.parametrize("source", ["quantized by the load", "read from the copy"])
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
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", swept(["qwen2_moe", "gpt_oss", "llama4_text"], ["qwen2_moe"]))
def test_quantized_experts_go_whole_to_ranks(name: str, tmp_path: Path) -> None:
    formats: list[FormatName] = ["int8"] * 6
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, 3, role):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "mixtral", num_local_experts=2)
    [role] = roles(model, 1)
    with pytest.raises(InputError, match="3 ranks cannot share 2 experts"):
        together(3, lambda collectives: part(role, model, collectives))


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_layers_change_their_bits_on_all_ranks(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    write_artefact(model)
    before, after = (roles(model, 1, formats=(name,) * 6)[0] for name in ("any4", "any6"))

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage = part(before, model, collectives)
        for layer in range(6):
            read_change(stage, layer, 6).apply()
        return run(stage, after)

    expected = logits(model, after.format, stages=1)
    for computed in together(3, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
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
    configs = {name: {"model_type": ALL[name][0], **tiny_config(name)[1]} for name in ALL}
    assert {text_part(configs[name])["model_type"] for name in KNOWN} == DIVIDED
    assert tuple(PART_MAKERS) == DIVIDED_FORMATS
    for name, config in configs.items():
        if name in KNOWN:
            check_divided(config)
        else:
            with pytest.raises(UnsupportedModelError, match=r"use placement\.tensorParallel \[1\]"):
                check_divided(config)


@pytest.mark.parametrize("name", swept([*REFUSED, *ALIKE], list(REFUSED)))
def test_what_is_not_cut_yet_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    with pytest.raises(InputError, match=(REFUSED | ALIKE)[name]):
        together(2, lambda collectives: part(role, model, collectives))


@pytest.mark.parametrize("name", ["w8a8", "int4"])
def test_a_format_that_is_not_cut_is_refused_with_those_that_are(name: FormatName, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    [role] = roles(model, 1, formats=(name,) * 6)
    with pytest.raises(InputError, match=f"dense, int8, any3.*, not in {name}"):
        together(2, lambda collectives: part(role, model, collectives))
