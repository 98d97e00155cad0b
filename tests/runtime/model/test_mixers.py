"""Layers with state: however texts are cut and packed, each is computed as if it were alone; and as transformers computes it whole."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.contract.architectures import SUPPORTED
from strata_planner.contract.frames import Segment
from strata_runtime.model import mixers
from strata_runtime.model.kv.states import TOKENS_AT_ONCE
from tests.laws import share, swept
from tests.runtime.architectures import make_tiny_model, unsliced
from tests.runtime.loading.stages import Stages, roles

MIXED = sorted(name for name, architecture in SUPPORTED.items() if architecture.mixer)
KINDS = swept(MIXED, ["qwen3_next", "lfm2"])
LENGTHS = (23, 9, 14)
TEXTS = {
    sequence: torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(sequence))
    for sequence, length in enumerate(LENGTHS)
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stateful")


def a_model(folders: Path, name: str) -> Path:
    folder = folders / name
    return folder if folder.exists() else make_tiny_model(folder, name)


def run(stages: Stages, steps: Sequence[Sequence[tuple[int, int]]]) -> dict[int, torch.Tensor]:
    """steps: of (sequence, tokens) each. Returns each sequence's logits [tokens, vocab]."""
    logits: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in TEXTS}
    starts = dict.fromkeys(TEXTS, 0)
    for step in steps:
        segments = [Segment(sequence, starts[sequence], length, length) for sequence, length in step]
        rows = stages.step(TEXTS, segments)
        for (sequence, length), part in zip(step, rows.split([length for _, length in step]), strict=True):
            logits[sequence].append(part)
            starts[sequence] += length
    for sequence in TEXTS:
        for cache in stages.caches:
            cache.free(sequence)
        stages.blocks.free(sequence)
    return {sequence: torch.cat(parts) for sequence, parts in logits.items() if parts}


@st.composite
def packed(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """All texts, cut anyhow: each step has a segment of some of those that are not at their end, in any order."""
    left, steps = dict(enumerate(LENGTHS)), []
    while any(left.values()):
        waiting = [sequence for sequence, tokens in left.items() if tokens]
        chosen = draw(st.permutations(waiting))[: draw(st.integers(1, len(waiting)))]
        step = [(sequence, min(left[sequence], draw(st.sampled_from([1, 1, 2, 3, 7, 23])))) for sequence in chosen]
        for sequence, length in step:
            left[sequence] -= length
        steps.append(step)
    return steps


@pytest.mark.parametrize("stages", swept([1, 2, 3], [2]))
@pytest.mark.parametrize("name", swept(MIXED, ["qwen3_next"]))
def test_a_packed_batch_is_its_sequences_alone(folders: Path, name: str, stages: int) -> None:
    model = a_model(folders, name)
    loaded = Stages(model, roles(model, stages))
    alone = {sequence: run(loaded, [[(sequence, length)]])[sequence] for sequence, length in enumerate(LENGTHS)}
    whole = unsliced(model, attn_implementation="eager")
    with torch.inference_mode():
        for sequence, tokens in TEXTS.items():
            assert_equal(alone[sequence], whole(tokens[None]).logits[0])

    @settings(max_examples=share(24), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(packed())
    def however_it_is_cut(steps: list[list[tuple[int, int]]]) -> None:
        for sequence, logits in run(loaded, steps).items():
            assert_equal(logits, alone[sequence])

    however_it_is_cut()


def assert_equal(logits: torch.Tensor, wanted: torch.Tensor) -> None:
    """In float32. What the first tokens read of a state is normalised however small it is, and the rounding of one way to cut them with it; what
    another sequence left there would be as large as the logits.
    """
    assert (logits - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_states_that_move_together_move_as_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    states, slots = torch.randn(5, 3, 4, 6, generator=generator), torch.tensor([4, 0, 2])
    shapes = ((3, 3, 4), (3, 3, 4), (3, 3, 6), (3, 3), (3, 3))
    given = tuple(torch.rand(shape, generator=generator) for shape in shapes)
    together, in_turn = states.clone(), states.clone()
    out = mixers._move_together(together, slots, given)
    torch.testing.assert_close(out, mixers._move_in_turn(in_turn, slots, given))
    torch.testing.assert_close(together, in_turn)
    untouched = [1, 3]
    assert torch.equal(together[untouched], states[untouched])
    assert not torch.equal(together, states)


@pytest.mark.parametrize("name", KINDS)
def test_a_segment_longer_than_what_passes_at_once_is_as_many(folders: Path, name: str) -> None:
    model = make_tiny_model(folders / f"{name}-long", name, max_position_embeddings=1024)
    tokens = torch.randint(3, 96, (TOKENS_AT_ONCE + 70,), generator=torch.Generator().manual_seed(9))
    stages = Stages(model, roles(model, 1))
    (logits,) = (stages.step({0: tokens}, [Segment(0, 0, len(tokens), 4)]),)
    with torch.inference_mode():
        assert_equal(logits, unsliced(model, attn_implementation="eager")(tokens[None]).logits[0, -4:])
