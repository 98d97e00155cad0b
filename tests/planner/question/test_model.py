"""Models read from config.json: published sizes, peculiar shapes, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.errors import ModelError
from strata_planner.question.model import Model
from tests.planner.builders import a_config, a_model

EXAMPLES = Path("examples/models")
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "bloom-176b": 176_247_271_424,
    "opt-30b": 29_974_540_288,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_published_models_have_their_published_size(name: str, parameters: int) -> None:
    assert Model.from_folder(EXAMPLES / name, for_serving=False).parameters == parameters


def test_grouped_queries_and_gated_mlp() -> None:
    layer = Model.from_folder(EXAMPLES / "llama-3.1-70b").layers[0]
    shapes = {each.name: (each.out_features, each.in_features) for each in layer.linears}
    assert shapes["k_proj"] == (1024, 8192)
    assert shapes["down_proj"] == (8192, 28672)
    assert layer.mlp_width == 2 * 28672


def test_experts_are_stored_all_and_used_some() -> None:
    config = a_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    linear = next(each for each in Model.from_config(config).layers[0].linears if each.name == "experts.down")
    assert (linear.copies, linear.active, linear.quantizable) == (8, 2, True)


def test_opts_narrow_embedding() -> None:
    fields = {"word_embed_proj_dim": 64, "ffn_dim": 512, "enable_bias": True}
    model = Model.from_config(a_config(model_type="opt", **fields))
    assert model.embedding_size == 64
    assert model.embedding_other == (2048 + 2) * 128 + 64 * 128
    assert model.head_other == 64 * 128 + 2 * 128


def test_a_folder_or_its_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(a_config()))
    assert Model.from_folder(tmp_path) == Model.from_folder(tmp_path / "config.json") == a_model()


def test_what_the_engine_lacks_is_refused_unless_only_shapes_are_studied() -> None:
    config = a_config(alibi=True)
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        Model.from_config(config)
    assert Model.from_config(config, for_serving=False) == a_model()


def test_nothing_bounds_the_positions_of_alibi() -> None:
    assert Model.from_folder(EXAMPLES / "bloom-176b").max_positions == 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    "text": ({"hidden_size": "128"}, "hidden_size is '128'"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "heads": ({"num_key_value_heads": 3}, "must divide"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        a_model(**changes)


def test_a_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no .*config.json"):
        Model.from_folder(tmp_path)
    with pytest.raises(ModelError, match="nowhere"):
        Model.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        Model.from_folder(tmp_path)
    with pytest.raises(ModelError, match="list"):
        Model.from_config([])  # type: ignore[arg-type]


def test_a_token_takes_no_more_experts_than_there_are() -> None:
    config = a_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=9)
    with pytest.raises(ModelError, match="a token takes 9 of 8 experts"):
        Model.from_config(config)
