"""`strata up` serves a mixture of experts in few bits, with the tokens of the model that its weights stand for."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strata_runtime.model.random_model import make_random_model
from tests.laws import swept
from tests.operator.local.test_up_end_to_end import SMALL, Up, make_tokenizer
from tests.runtime.loading.float8_models import make_float8_model
from tests.runtime.loading.gptq_models import make_plain_model
from tests.runtime.loading.stages import load, roles
from tests.runtime.loading.test_quantized_experts import dequantized

PROMPT, ANSWER = [5, 9, 2], 24


def make_experts(folder: Path) -> Path:
    return make_random_model(
        folder,
        "qwen3_moe",
        **SMALL,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
    )


def greedy(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(ANSWER):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("stored", swept(["float8", "rounded"], []))
def test_experts_in_few_bits_are_served(stored: str, tmp_path: Path) -> None:
    plain, served = make_experts(tmp_path / "plain"), tmp_path / "made"
    weights: Mapping[str, Tensor]
    if stored == "float8":
        weights = make_float8_model(plain, served)
    else:
        shutil.copytree(plain, served)
        weights = dequantized(served, load(roles(served, 1, formats=("int4",) * 6)[0], served))

    def make(folder: Path) -> None:
        make_tokenizer(folder)
        shutil.copytree(served, folder, dirs_exist_ok=True)

    up = Up(tmp_path, bits=8 if stored == "float8" else 4, make=make)
    try:
        answer = "".join(up.stream(PROMPT, max_tokens=ANSWER))
    finally:
        assert up.stop() == 0
    expected = greedy(make_plain_model(plain, tmp_path / "same", weights))
    assert [int(word.removeprefix("w")) for word in answer.split()] == expected != greedy(plain)
