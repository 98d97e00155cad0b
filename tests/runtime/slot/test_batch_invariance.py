"""In 16 bits a token's logits are the same bits whatever it is computed with: the law that makes replays, chunks and verifications exact on processors
that multiply bfloat16.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Segment
from strata_runtime.kernels import native_dense
from strata_runtime.model.random_model import make_random_model
from tests.laws import share, swept
from tests.runtime.loading.stages import CPU, Stages, roles

pytestmark = pytest.mark.skipif(
    not native_dense.takes(torch.bfloat16, CPU), reason="this processor's products depend on the batch"
)
LENGTH, SEQUENCES = share(160, 2), 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("model")
    return make_random_model(
        folder, "llama", dtype=torch.bfloat16, num_hidden_layers=4, vocab_size=320, **shapes, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def texts() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {number: torch.randint(3, 320, (LENGTH,), generator=generator) for number in range(SEQUENCES)}


@pytest.fixture(scope="module")
def alone(model: Path, texts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The logits of every position, token after token, each text by itself."""
    found = {}
    for number in texts:
        stages = Stages(model, roles(model, 1, compute_type="bfloat16"))
        rows = [stages.step(texts, [Segment(number, place, 1, 1)]) for place in range(LENGTH)]
        found[number] = torch.cat(rows)
    return found


@settings(max_examples=share(16), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("count", swept([1, 2], [2]))
def test_however_texts_are_cut_and_packed(
    model: Path,
    texts: dict[int, torch.Tensor],
    alone: dict[int, torch.Tensor],
    count: int,
    data: st.DataObject,
) -> None:
    stages = Stages(model, roles(model, count, compute_type="bfloat16"))
    at = dict.fromkeys(texts, 0)
    while unfinished := [number for number, place in at.items() if place < LENGTH]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        lengths = [data.draw(st.sampled_from([1, 1, 2, 5, 20, 70])) for _ in chosen]
        segments = [
            Segment(number, at[number], wanted, wanted)
            for number, length in zip(chosen, lengths, strict=True)
            for wanted in [min(length, LENGTH - at[number])]
        ]
        expected = torch.cat([alone[each.sequence][each.start : each.start + each.length] for each in segments])
        assert torch.equal(stages.step(texts, segments), expected)
        for each in segments:
            at[each.sequence] += each.length
