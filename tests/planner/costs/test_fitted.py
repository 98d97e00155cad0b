"""The fitted source: right where its profile is, silent where it is not, flagged where it goes beyond."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_planner.contract.latencies import HandlingPoint, StoredLinear
from strata_planner.contract.quantization import ModuleQuantization
from strata_planner.costs.fitted import FittedLatency, steps_of
from strata_planner.costs.latency import Latencies
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.source import Phase, Rates, prefill_phase
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_model, a_profile, a_request
from tests.planner.latency_profiles import FORMATS, a_latency_profile, law, the_points

ANY_FORMATS: tuple[FormatName, ...] = tuple(ANY_PRECISION.values())
SOURCE = FittedLatency(a_latency_profile())
ANY_SOURCE = FittedLatency(a_latency_profile(formats=("dense", *ANY_FORMATS)))
LAYER = a_model().layers[0]
RATES = Rates(a_profile(threads=1), "bfloat16", 16, "cpu")


@settings(deadline=None)  # a busy machine is no failure
@given(name=st.sampled_from(FORMATS), sequences=st.sampled_from([1, 3, 5, 7, 20]), past=st.integers(16, 400))
def test_decoding_is_told_where_nothing_was_measured(name: FormatName, sequences: int, past: int) -> None:
    told = SOURCE.layer(LAYER, name, RATES, Phase(sequences, 1, past + 1))
    assert told is not None
    assert told.seconds == pytest.approx(law(name, sequences, 1, past), rel=0.02)


@settings(deadline=None)  # a busy machine is no failure
@given(name=st.sampled_from(FORMATS), sequences=st.sampled_from([1, 3]), tokens=st.integers(130, 340))
def test_prefilling_is_told_where_nothing_was_measured(name: FormatName, sequences: int, tokens: int) -> None:
    told = SOURCE.layer(LAYER, name, RATES, prefill_phase(Workload(tokens, 1, 1), sequences))
    assert told is not None
    assert told.seconds == pytest.approx(law(name, sequences, tokens, 0), rel=0.02)


@pytest.mark.parametrize("rows", [16, 17])
def test_a_kernel_that_changes_with_the_rows_is_not_smoothed_over(rows: int) -> None:
    told = SOURCE.layer(LAYER, "int4", RATES, Phase(rows, 1, 100))
    assert told is not None
    assert told.seconds == pytest.approx(law("int4", rows, 1, 99), rel=0.02)


def test_attention_is_apart_from_the_rest() -> None:
    """A simulator prices steps of mixed lengths so: all tokens without keys, then each part's attention."""
    without, half, whole = (SOURCE.layer(LAYER, "dense", RATES, Phase(1, 512, each)) for each in (0, 128, 256))
    assert without is not None
    assert half is not None
    assert whole is not None
    assert whole.seconds - half.seconds == pytest.approx(half.seconds - without.seconds, rel=1e-6)
    assert whole.seconds > without.seconds


def test_a_mixed_step_costs_its_rows_once() -> None:
    chunk, decoding = Phase(1, 100, 50), Phase(20, 1, 300)
    mixed, _ = SOURCE.step_layer("dense", (chunk, decoding))
    alone, _ = SOURCE.step_layer("dense", (Phase(1, 120, 60),))
    apart = sum(SOURCE.step_layer("dense", (each,))[0] for each in (chunk, decoding))
    assert alone < mixed < apart


@settings(deadline=None)  # a busy machine is no failure
@given(sequences=st.integers(1, 9), tokens=st.integers(2, 5000), most=st.integers(16, 2048))
def test_prompts_are_cut_into_full_steps_and_nothing_is_lost(sequences: int, tokens: int, most: int) -> None:
    steps = steps_of(Phase(sequences, tokens, tokens / 2), most)
    sizes = [sum(chunk.total_tokens for chunk in step) for step in steps]
    assert sum(sizes) == sequences * tokens
    assert all(size == most for size in sizes[:-1]) or len(sizes) == 1
    keys = sum(chunk.total_tokens * chunk.context for step in steps for chunk in step)
    assert keys == pytest.approx(sequences * tokens * tokens / 2)


@pytest.mark.parametrize(
    ("layer", "name", "rates"),
    [
        (a_model(intermediate_size=512).layers[0], "dense", RATES),
        (a_model(num_key_value_heads=4).layers[0], "dense", RATES),
        (LAYER, "w8a8", RATES),
        (LAYER, "dense", Rates(a_profile(threads=2), "bfloat16", 16, "cpu")),
        (LAYER, "dense", Rates(a_profile(threads=1), "float32", 16, "cpu")),
        (LAYER, "dense", Rates(a_profile(type="gpu", threads=1), "bfloat16", 16, "gpu")),
        (LAYER, "dense", Rates(a_profile(threads=1), "bfloat16", 8, "cpu")),
    ],
    ids=["width", "heads", "format", "threads", "compute-type", "device", "kv-bits"],
)
def test_what_was_not_measured_is_left_to_other_sources(layer: object, name: FormatName, rates: Rates) -> None:
    assert SOURCE.layer(layer, name, rates, Phase(1, 1, 100)) is None  # type: ignore[arg-type]


@settings(deadline=None)  # a busy machine is no failure
@given(name=st.sampled_from(ANY_FORMATS), sequences=st.integers(1, 64), past=st.integers(16, 400))
def test_formats_of_any_precision_have_numbers_and_kernels_of_their_own(
    name: FormatName, sequences: int, past: int
) -> None:
    told = ANY_SOURCE.layer(LAYER, name, RATES, Phase(sequences, 1, past + 1))
    assert told is not None
    assert told.source.startswith("profile of")
    assert told.seconds == pytest.approx(law(name, sequences, 1, past), rel=0.02)


@settings(deadline=None)  # a busy machine is no failure
@given(
    measured=st.lists(st.sampled_from((*FORMATS, *ANY_FORMATS)), min_size=1, max_size=3, unique=True),
    asked=st.sampled_from((*FORMATS, *ANY_FORMATS)),
    kv_bits=st.sampled_from([8, 16]),
    tokens=st.sampled_from([1, 200]),
)
def test_a_format_or_kv_bits_that_a_profile_lacks_come_from_the_next_source(
    measured: list[FormatName], asked: FormatName, kv_bits: int, tokens: int
) -> None:
    source = FittedLatency(a_latency_profile(formats=measured, kv_bits=8))
    rates = Rates(a_profile(threads=1), "bfloat16", kv_bits, "cpu")
    phase = Phase(2, tokens, tokens)
    told = Latencies((source,)).layer(LAYER, asked, rates, phase)
    if asked in measured and kv_bits == 8:
        assert told.source.startswith(source.name)
    else:
        assert told == Roofline().layer(LAYER, asked, rates, phase)
    for answer in (source.head(a_model(), rates, 3), source.step(a_model(), rates, phase)):
        assert (answer is None) is (kv_bits == 16)


def test_a_format_of_which_one_phase_alone_was_measured_is_not_answered() -> None:
    decode_alone = FittedLatency(
        a_latency_profile(points=lambda name: [each for each in the_points(name) if each.phase == "decode"])
    )
    assert decode_alone.layer(LAYER, "dense", RATES, Phase(1, 1, 100)) is None


def test_layers_of_a_gptq_checkpoint_are_known_by_how_they_are_stored() -> None:
    how = ModuleQuantization(bits=4, group=32, ordered=False, symmetric=True)
    stored = [StoredLinear(each.out_features, each.in_features, how) for each in LAYER.linears]
    source = FittedLatency(a_latency_profile(formats=("dense", "gptq4"), stored={"gptq4": tuple(stored[::-1])}))
    for group, known in ((32, True), (64, False)):
        own = msgspec.structs.replace(how, group=group)
        layer = msgspec.structs.replace(
            LAYER, linears=tuple(msgspec.structs.replace(each, stored=own) for each in LAYER.linears)
        )
        assert source.knows_format(layer, "gptq4") is known
        assert source.knows_format(layer, "dense")


def test_the_roofline_answers_for_another_shape() -> None:
    wider = a_model(intermediate_size=512).layers[0]
    assert Latencies((SOURCE,)).layer(wider, "dense", RATES, Phase(1, 1, 100)).source.startswith("roofline")


@pytest.mark.parametrize(
    ("phase", "beyond"),
    [
        (Phase(3, 1, 400), False),
        (Phase(3, 1, 90_000), True),
        (Phase(500, 1, 10), True),
        (Phase(1, 300, 150), False),
        (Phase(1, 700, 5000), True),
    ],
)
def test_what_lies_beyond_the_grid_is_flagged(phase: Phase, *, beyond: bool) -> None:
    told = SOURCE.layer(LAYER, "dense", RATES, phase)
    assert told is not None
    assert told.source.endswith("extrapolated") is beyond


def test_the_head_and_the_step_are_told() -> None:
    head, step = SOURCE.head(a_model(), RATES, 3), SOURCE.step(a_model(), RATES, Phase(8, 1, 100))
    assert head is not None
    assert head.seconds == pytest.approx(1e-3 + 4e-4)  # three rows are padded to four
    assert step is not None
    assert step.seconds == pytest.approx(1e-4 + 8e-5, rel=1e-3)
    assert SOURCE.head(a_model(vocab_size=1024), RATES, 3) is None


def test_the_handling_of_a_step_comes_on_top() -> None:
    loads = ((1.0, 1.0), (3.7, 3.7), (16.0, 16.0), (2.0, 700.0))
    handling = tuple(HandlingPoint(v, s, 2e-4 + 1e-6 * v + 2e-6 * s) for v, s in loads)
    with_it = FittedLatency(a_latency_profile(handling=handling))
    for phase in (Phase(8, 1, 100), Phase(2, 300, 150)):
        more, less = with_it.step(a_model(), RATES, phase), SOURCE.step(a_model(), RATES, phase)
        assert more is not None
        assert less is not None
        expected = 2e-4 + 1e-6 * phase.sequences + 2e-6 * phase.total_tokens
        assert more.seconds - less.seconds == pytest.approx(expected, rel=1e-3)


def test_points_left_out_are_told_well_on_a_device_that_keeps_the_law() -> None:
    errors = SOURCE.leave_one_out
    assert set(errors) == {f"{name} {phase}" for name in FORMATS for phase in ("prefill", "decode")}
    assert max(errors.values()) < 0.03


def test_a_plan_says_where_its_seconds_are_from() -> None:
    cluster = Cluster((Node("a", (Device(CPU, threads=1),)),)).with_profile(a_profile(threads=1))
    plan = make_plan(a_request(cluster, latency_sources=(SOURCE,))).plan
    assert all(stage.times.source.startswith(SOURCE.name) for stage in plan.replicas[0].stages)
