"""Profiling: the grid's promises, notes that survive an interruption, and a small profile of this machine through the real path."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.latencies import LATENCY_PROFILE_VERSION, LatencyProfile, ProfiledDevice
from strata_runtime.errors import InputError
from strata_runtime.formats.gptq.kernels import GPTQ_KERNELS
from strata_runtime.formats.kernels import CHANNEL_KERNELS, FLOAT8_KERNELS, GROUP_KERNELS, PLANE_KERNELS, STATIC_KERNELS
from strata_runtime.measuring.profiling import survey as surveys
from strata_runtime.measuring.profiling.company import in_company
from strata_runtime.measuring.profiling.fields import read_fields
from strata_runtime.measuring.profiling.grid import Limits, grid
from strata_runtime.measuring.profiling.handling import Load, idle_pipeline
from strata_runtime.measuring.profiling.model import Sizes, make_shallow, shapes_of
from strata_runtime.measuring.profiling.notes import Notes
from strata_runtime.measuring.profiling.stage import ProfiledStage, StageSpec
from strata_runtime.measuring.profiling.survey import Subject, Survey
from strata_runtime.model.padding import pads
from tests.laws import share
from tests.runtime.measuring.profiling.shapes import FIELDS, WORKS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow(FIELDS, 3, tmp_path_factory.mktemp("model"))


@settings(deadline=None)  # a busy machine is no failure
@given(positions=st.integers(64, 5000), cached=st.integers(256, 40_000), quick=st.booleans())
def test_the_grid_stays_within_its_limits(positions: int, cached: int, *, quick: bool) -> None:
    works = grid(Limits(positions, cached, quick))
    assert len(set(works)) == len(works)
    assert all(work.longest <= positions and work.cached_tokens <= cached for work in works)
    assert {work.phase for work in works} == {"prefill", "decode"}


def test_batches_and_contexts_of_the_validation_are_not_measured() -> None:
    works = grid(Limits(4096, 1 << 20))
    assert not {work.sequences for work in works} & {3, 5, 7}
    assert not {work.past for work in works} & {384, 768}


def test_there_are_rows_on_either_side_of_every_change_of_kernel() -> None:
    """So that no kernel's line is drawn across another's."""
    tables = (CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS, STATIC_KERNELS, FLOAT8_KERNELS, GPTQ_KERNELS)
    limits = {kernel.most_tokens for table in tables for kernel in table if kernel.most_tokens < 1 << 20}
    for phase in ("decode", "prefill"):
        rows = {work.total_tokens for work in grid(Limits(4096, 1 << 20)) if work.phase == phase}
        assert limits <= rows
        assert all(any(limit < each <= 2 * limit for each in rows) for limit in limits)


def test_a_stage_runs_every_work_again_and_again(model: Path) -> None:
    for head in (False, True):
        spec = StageSpec(("int4",) * (1 if head else 2), "bfloat16", 1024, 256, head=head, first=2 if head else 0)
        stage = ProfiledStage(model, spec, CPU)
        for work in (*WORKS, WORKS[0]):
            stage.prepare(work)
            for _ in range(2):
                taken = stage.run(work)
                assert min(taken.layer, taken.before, taken.after) >= 0
                assert taken.layer > 0


def test_pages_are_of_the_bits_that_are_measured(model: Path) -> None:
    pools = {}
    for bits in (16, 8):
        stage = ProfiledStage(model, StageSpec(("dense",), "bfloat16", 1024, 256, kv_bits=bits), CPU)
        stage.prepare(WORKS[0])
        assert stage.run(WORKS[0]).layer > 0
        pools[bits] = stage.cache.bytes
    assert pools[8] < 0.6 * pools[16]


def test_a_stage_names_the_kernels_that_would_run(model: Path) -> None:
    def kernels(name: FormatName, rows: int) -> str:
        return ProfiledStage(model, StageSpec((name,), "float32", 64, 64), CPU).kernels(rows)

    assert kernels("dense", 1) == "dense"
    assert kernels("int8", 1) == "int8-converted"  # packed kernels are for bfloat16
    assert kernels("int4", 500) == "int4-dequantized"


def some_notes(folder: Path, key: str = "a") -> Notes:
    return Notes(folder / "p.notes", {"key": key})


def test_notes_go_on_where_they_stopped(tmp_path: Path) -> None:
    notes = some_notes(tmp_path)
    notes.add(("dense", 1), [(1.0, 5.0), (3.0, 4.0)])
    notes.add(("dense", 1), [(2.0, 6.0)])
    notes.close(done=False)
    with (tmp_path / "p.notes").open("a") as file:
        file.write('{"name": ["dense", 2], "ru')  # cut off
    again = some_notes(tmp_path)
    assert (again.resumed, again.passes(("dense", 1)), again.passes(("dense", 2))) == (2, 2, 0)
    assert again.quantile(("dense", 1), 0.0) == (1.0, 4.0)
    assert again.quantile(("dense", 1), 0.5) == (2.0, 5.0)
    again.close(done=True)
    assert not list(tmp_path.iterdir())


def test_notes_of_another_survey_are_thrown_away(tmp_path: Path) -> None:
    notes = some_notes(tmp_path)
    notes.add(("dense", 1), [(1.0,)])
    notes.close(done=False)
    other = some_notes(tmp_path, "b")
    assert not other.resumed
    other.close(done=True)


def small_survey(folder: Path, said: list[tuple[int, int, str]]) -> tuple[Survey, Notes]:
    device = ProfiledDevice("cpu", "this one", 1, "some")
    formats: Sequence[FormatName] = ("dense", "int4")
    subject = Subject(
        FIELDS, device, CPU, "bfloat16", quick=True, formats=tuple(formats), more=WORKS[:1], passes=surveys.PASSES
    )
    notes = Notes(folder / "small.notes", subject.key)
    return Survey(subject, notes, lambda *told: said.append(told)), notes


@pytest.mark.slow  # test_command.py runs one
@pytest.mark.usefixtures("small")
def test_a_survey_of_this_machine_is_a_profile_and_resumes(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    survey, notes = small_survey(tmp_path, said)
    profile = survey.run()
    profile.check()
    assert said[-1][0] == said[-1][1] == len(said)
    assert len(profile.points) == 2 * len(WORKS)
    assert LatencyProfile.decode(profile.encode()) == profile
    assert profile.version == LATENCY_PROFILE_VERSION
    assert [shape.out_features for shape in profile.model.linears] == [32, 32, 64, 64, 64, 128, 128]
    assert profile.layers == {"dense": 5, "int4": 5}  # as many as the model has: all of it fits in the cache
    padded = ((1, 2, 3, 4, 6), 128) if pads(torch.bfloat16) else ((), 1)
    assert (profile.row_sizes[:5], profile.row_multiple) == padded
    assert [each.sequences for each in profile.head] == [1, 4]
    assert len(profile.handling) == 1
    notes.close(done=False)
    again, kept = small_survey(tmp_path, said)
    assert kept.resumed == notes.resumed
    assert again.run() == profile  # nothing was measured again
    kept.close(done=True)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_what_is_to_be_judged_by_a_profile_runs_between_its_passes(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    met: list[tuple[int, LatencyProfile]] = []
    survey, notes = small_survey(tmp_path, said)
    survey.subject = replace(survey.subject, passes=3)
    survey.between = lambda profile: met.append((len(said), profile))
    profile = survey.run()
    notes.close(done=True)
    share = len(said) // 3
    assert [at for at, _ in met] == [share, 2 * share]
    assert {len(each.points) for _, each in met} == {len(profile.points)}


@settings(deadline=None, max_examples=share(8))
@given(requests=st.integers(1, 9), prompt=st.integers(1, 40), answer=st.integers(1, 5))
def test_handling_counts_what_the_steps_of_a_load_carry(requests: int, prompt: int, answer: int) -> None:
    with idle_pipeline(64, "bfloat16", 128) as pipeline:
        for _ in range(2):
            handled = pipeline.handle(Load(requests, prompt, answer))
            assert handled.seconds > 0
            # each request is a segment of one step for its prompt at least, and of one for every later token
            steps = requests * answer / handled.sequences
            assert handled.tokens * steps == pytest.approx(requests * (prompt + answer - 1), rel=0.2)
            assert 1 <= handled.sequences <= min(requests, handled.tokens)


@pytest.mark.slow  # a process that imports torch and quantizes
def test_company_works_until_the_block_ends() -> None:
    before = set(psutil.Process().children())
    with in_company(1, FIELDS, "int8", "bfloat16"):
        (other,) = (
            each
            for each in set(psutil.Process().children()) - before
            if "strata_runtime.measuring.profiling.company" in each.cmdline()
        )
        assert other.is_running()
    assert not other.is_running()


def test_sizes_are_read_under_every_architectures_names() -> None:
    sizes = Sizes.of({"model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 2, "n_positions": 64})
    assert (sizes.depth, sizes.hidden, sizes.width, sizes.kv_heads, sizes.head_dim) == (3, 128, 512, 2, 64)
    with pytest.raises(InputError):
        read_fields(Path("nowhere"))


def test_models_with_state_are_planned_without_a_profile(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a profile knows no 'lfm2': its layers are of two kinds"):
        make_shallow({"model_type": "lfm2", "num_hidden_layers": 4}, 2, tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS | {"model_type": "gemma2", "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {
            "model_type": "opt",
            "vocab_size": 96,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
        },
    ],
    ids=["gemma2", "opt"],
)
def test_other_architectures_are_measured_too(fields: dict[str, object], tmp_path: Path) -> None:
    """One layer more than the model has: the head's is behind all that are gone through."""
    fields = fields | {"num_hidden_layers": 4}
    stage = ProfiledStage(make_shallow(fields, 5, tmp_path), StageSpec(("int8",) * 4, "bfloat16", 512, 256), CPU)
    stage.prepare(WORKS[0])
    assert stage.run(WORKS[0]).layer > 0
    assert shapes_of(stage.model, fields).linears
