"""A stage whose ranks have unlike shares computes what one rank alone does, and each rank holds its share."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.formats import FormatName
from strata_planner.contract.shares import Shares
from strata_planner.contract.strategies import StrategyName
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.costs.shards import Portion, portion_of
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.precision_switch import read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.slot.switching import moves_within
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.gptq_models import formats_of, make_gptq_model
from tests.runtime.loading.parity import logits
from tests.runtime.loading.shared import part, run, shared
from tests.runtime.loading.stages import CPU, roles
from tests.runtime.loading.test_ranks import KNOWN, TOLERANCE, tolerance
from tests.runtime.ranks.together import together

UNLIKE: list[Shares] = [(3, 1), (1, 3), (1, 2, 4)]
STANDING = [
    ("phi3", (3, 1)),
    ("qwen2_moe", (1, 2, 4)),
    ("llama", (1, 3)),
    ("deepseek_v3", (3, 1)),
    ("qwen3_next", (1, 2, 4)),
]


@pytest.mark.parametrize("case", swept([(name, shares) for name in KNOWN for shares in UNLIKE], STANDING))
def test_any_shares_compute_what_one_rank_does(case: tuple[str, Shares], tmp_path: Path) -> None:
    """Ragged batches, whose sequences go on from what is in the cache."""
    name, shares = case
    model = make_tiny_model(tmp_path, name)
    [role] = roles(model, 1)
    expected = logits(model, stages=1)
    for computed in shared(model, len(shares), structs.replace(role, shares=shares)):
        torch.testing.assert_close(computed, expected, rtol=0, atol=tolerance(name))


FORMATS: list[Sequence[FormatName]] = [
    ("any4",) * 6,
    ("int8",) * 6,
    ("int4", "int3", "fp8_e4m3") * 2,
    ("any3", "any8", "dense", "any5", "int8", "any6"),
]


@pytest.mark.parametrize("formats", swept(FORMATS, FORMATS[3:]), ids=["any4", "int8", "rounded", "mixed"])
@pytest.mark.parametrize("name", swept(["llama", "phi3", "olmo2"], ["phi3"]))
@pytest.mark.parametrize("shares", swept(UNLIKE, [(1, 3)]))
def test_a_weight_is_the_same_whatever_its_shares(
    formats: Sequence[FormatName], name: str, shares: Shares, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, name, hidden_size=128, intermediate_size=256)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, len(shares), structs.replace(role, shares=shares)):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow  # the test of a weight has other formats
def test_what_a_checkpoint_holds_quantized_is_the_same_whatever_its_shares(tmp_path: Path) -> None:
    plain, model = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "quantized"
    make_gptq_model(plain, model, {"group_size": 16, "dynamic": {r".*\.2\.": {"bits": 8}}})
    formats = formats_of(model)
    [role] = roles(model, 1, formats=formats)
    expected = logits(model, formats, stages=1)
    for computed in shared(model, 2, structs.replace(role, shares=(3, 1))):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", swept(["projection-replicated", "weight-gathered"], ["projection-replicated"]))
def test_strategies_compute_the_same_of_unlike_shares(strategy: StrategyName, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    [role] = roles(model, 1)
    expected = logits(model, stages=1)
    unlike = structs.replace(role, shares=(3, 1), strategies=((1, strategy),))

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage = part(unlike, model, collectives)
        stage.switch.strategy = strategy
        return run(stage, unlike)

    for computed in together(2, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)


def bytes_of(stage: StageModel) -> int:
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in stage._stage.module.parameters()}
    return sum(weights.values())


@pytest.mark.parametrize("shares", [(3, 1), (5, 2, 1)])
def test_a_rank_holds_its_share_as_the_planner_counts_it(shares: Shares, tmp_path: Path) -> None:
    """Weights, and the keys and values of its heads."""
    model = make_tiny_model(
        tmp_path,
        "llama",
        vocab_size=960,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    [role] = roles(model, 1)
    shape, unlike = Model.from_folder(model), structs.replace(role, shares=shares)

    def body(collectives: SharedMemory) -> tuple[int, int]:
        stage = part(unlike, model, collectives)
        return bytes_of(stage), cache_of(unlike, stage).bytes

    whole = load_stage(role, model, lambda *_: None, CPU)
    held = together(len(shares), body)
    for rank, (weights, keys) in enumerate(held):
        own = portion_of(shape.layers[0], Portion(shares, rank))
        assert keys * shape.layers[0].kv_heads == own.kv_heads * cache_of(role, whole).bytes
        layers = shape.num_layers * layer_weights_bytes(own, "dense", role.compute_type)
        tables = Portion(shares, rank).rows(shape.vocab_size, 2 * 4 * shape.table)
        assert weights == pytest.approx(layers + tables, rel=0.001)  # and the last norm
    assert held[0][0] > 2 * held[1][0]


def test_bits_change_on_ranks_of_unlike_shares_within_the_memory_of_each(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    write_artefact(model)
    before, after = (roles(model, 1, formats=(name,) * 6)[0] for name in ("any4", "any6"))
    unlike = structs.replace(before, shares=(3, 1))

    def body(collectives: SharedMemory) -> torch.Tensor:
        stage, rank = part(unlike, model, collectives), collectives.rank
        devices = tuple(
            structs.replace(before.devices[0], index=at, usable_bytes=size) for at, size in enumerate((1 << 30, 1000))
        )
        full = structs.replace(unlike, devices=devices, tensor_parallel=2, rank_bytes=(500, 400))
        wanted = dict.fromkeys(range(6), 6)
        if rank:
            with pytest.raises(InputError, match=r"the role takes 400 bytes then.*its device has 1,000"):
                moves_within(full, stage, wanted)
        else:
            assert len(moves_within(full, stage, wanted)) == 6
        for layer in range(6):
            read_change(stage, layer, 6).apply()
        return run(stage, after)

    expected = logits(model, after.format, stages=1)
    for computed in together(2, body):
        torch.testing.assert_close(computed, expected, rtol=0, atol=TOLERANCE)
