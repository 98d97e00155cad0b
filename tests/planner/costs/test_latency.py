"""The roofline: what bounds which phase, and in which direction it moves."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.rows import padded_rows
from strata_planner.costs.communication import RING_SHARE, hidden_states_seconds, layer_collectives_seconds
from strata_planner.costs.latency import Latencies
from strata_planner.costs.memory import kv_bytes_per_token
from strata_planner.costs.roofline import linear_seconds, row_values
from strata_planner.costs.shards import divisible, sharded
from strata_planner.costs.source import Phase, Rates, Timed, decode_phase, prefill_phase
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import LayerShape, Model
from strata_planner.question.workload import Workload
from tests.planner.builders import a_config, a_model, a_profile

LAYER = a_model().layers[0]
LOAD = Workload(prompt_tokens=512, output_tokens=100, concurrency=8)


def rates(**changes: object) -> Rates:
    return Rates(a_profile(**changes), "bfloat16", 16)


def layer_seconds(layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> float:
    return Latencies().layer(layer, format_name, rates, phase).seconds


def test_decoding_one_sequence_is_bound_by_bandwidth() -> None:
    phase = decode_phase(LOAD, 1)
    slow, fast = (layer_seconds(LAYER, "dense", rates(bandwidth_bytes_per_second=each), phase) for each in (1e9, 2e9))
    assert slow == pytest.approx(2 * fast)
    assert layer_seconds(LAYER, "dense", rates(flops_per_second=1e15), phase) == pytest.approx(slow)


def test_prefill_is_bound_by_arithmetic() -> None:
    phase = prefill_phase(LOAD, 4)
    slow, fast = (layer_seconds(LAYER, "dense", rates(flops_per_second=each), phase) for each in (1e9, 2e9))
    assert slow == pytest.approx(2 * fast, rel=1e-3)


def test_fewer_bits_decode_faster_at_equal_efficiency() -> None:
    times = [layer_seconds(LAYER, name, rates(), decode_phase(LOAD, 1)) for name in ("dense", "int8", "int4", "int3")]
    assert times == sorted(times, reverse=True)


def test_decode_reads_the_context_at_half_the_generation() -> None:
    assert decode_phase(LOAD, 3) == Phase(sequences=3, tokens=1, context=562)


def test_float32_computes_at_its_own_rate() -> None:
    phase = prefill_phase(LOAD, 4)
    half = layer_seconds(LAYER, "dense", rates(), phase)
    full = layer_seconds(LAYER, "dense", Rates(a_profile(), "float32", 16), phase)
    assert full == pytest.approx(2 * half, rel=0.01)


def test_every_layer_pays_its_launch() -> None:
    phase = decode_phase(LOAD, 1)
    with_launch = layer_seconds(LAYER, "dense", rates(layer_overhead_seconds=0.5), phase)
    assert with_launch == pytest.approx(layer_seconds(LAYER, "dense", rates(), phase) + 0.5)


def test_each_sequence_takes_its_attention_and_its_part_of_a_step() -> None:
    """What asks without keys asks without attention; keys are read at attention's own rate."""
    plain, slow = rates(), rates(sequence_layer_seconds=0.25, sequence_step_seconds=0.5, sampled_row_seconds=2.0)
    for phase in (Phase(1, 1, 32), Phase(5, 1, 32)):
        more = layer_seconds(LAYER, "dense", slow, phase) - layer_seconds(LAYER, "dense", plain, phase)
        assert more == pytest.approx(0.25 * phase.sequences)
        assert Latencies().step(a_model(), slow, phase).seconds == pytest.approx(0.5 * phase.sequences)
        head = [Latencies().head(a_model(), each, phase.sequences).seconds for each in (plain, slow)]
        assert head[1] - head[0] == pytest.approx(2.0 * phase.sequences)
    silent = Phase(5, 1, 0)
    assert layer_seconds(LAYER, "dense", slow, silent) == layer_seconds(LAYER, "dense", plain, silent)
    read = 5 * 32 * kv_bytes_per_token(LAYER, 16, "bfloat16")
    told = layer_seconds(LAYER, "dense", rates(attention_bytes_per_second=1e3), Phase(5, 1, 32))
    assert told - layer_seconds(LAYER, "dense", plain, silent) == pytest.approx(read / 1e3)


def test_prompts_pass_what_is_no_product_and_decoding_sequences_do_not() -> None:
    """Rows by their values, once for the step whatever its tokens, attention at a rate of its own."""
    plain = rates()
    slow = rates(activation_bytes_per_second=1e6, chunk_layer_seconds=0.5, attention_flops_per_second=1e6)
    for tokens in (2, 300):
        more = [layer_seconds(LAYER, "dense", each, Phase(1, tokens, 0)) for each in (plain, slow)]
        assert more[1] - more[0] == pytest.approx(0.5 + tokens * row_values(LAYER) * 2 / 1e6)
        seen = [layer_seconds(LAYER, "dense", slow, Phase(1, tokens, keys)) for keys in (0, 64)]
        assert seen[1] - seen[0] == pytest.approx(4 * tokens * 64 * LAYER.heads * LAYER.head_dim / 1e6)
    assert layer_seconds(LAYER, "dense", slow, Phase(4, 1, 64)) == layer_seconds(LAYER, "dense", plain, Phase(4, 1, 64))


@given(st.integers(1, 3000))
def test_a_processor_computes_the_rows_that_steps_are_padded_to(tokens: int) -> None:
    """A GPU computes those that there are, and a processor that pads none; reading weights takes as long either way."""
    gpu = rates(flops_per_second=1e6)
    cpu, unpadded = (
        dataclasses.replace(rates(flops_per_second=1e6, pads_rows=pads), name=CPU) for pads in (True, False)
    )
    linear = LAYER.linears[0]
    assert linear_seconds(linear, "dense", unpadded, tokens) == linear_seconds(linear, "dense", gpu, tokens)
    assert linear_seconds(linear, "dense", cpu, tokens) == linear_seconds(linear, "dense", gpu, padded_rows(tokens))


@pytest.mark.parametrize("flops", [1e6, 1e9])
def test_few_rows_take_longer_by_what_was_measured(flops: float) -> None:
    """Between two numbers that were timed by what is between them; experts and other formats as they were."""
    plain, few = (
        dataclasses.replace(rates(few_rows_efficiency=each, flops_per_second=flops), name=CPU)
        for each in ({}, {"dense": (0.8, 0.6, 0.5, 0.4)})
    )
    linear = LAYER.linears[0]
    share = {
        n: linear_seconds(linear, "dense", plain, n) / linear_seconds(linear, "dense", few, n)
        for n in (1, 2, 3, 4, 6, 8, 16, 64)
    }
    known = {1: 1.0, 2: 0.8, 4: 0.6, 8: 0.5, 16: 0.4}
    assert {n: share[n] for n in known} == pytest.approx(known)
    assert 0.6 < share[3] < 0.8
    assert 0.5 < share[6] < 0.6
    assert linear_seconds(linear, "int8", few, 4) == linear_seconds(linear, "int8", plain, 4)


@given(st.tuples(*[st.floats(0.05, 1.2)] * 4), st.sampled_from([1e6, 1e8, 1e10]), st.sampled_from([0, 32, 1 << 62]))
def test_more_rows_never_take_less(few: tuple[float, ...], flops: float, packed: int) -> None:
    """Whatever was measured of few of them."""
    told = dataclasses.replace(
        rates(few_rows_efficiency={"dense": few}, flops_per_second=flops, packed_rows={"dense": packed}), name=CPU
    )
    seconds = [linear_seconds(LAYER.linears[0], "dense", told, rows) for rows in (1, 2, 4, 8, 16, 64, 128, 256)]
    assert seconds == sorted(seconds)


def test_many_rows_unpack_weights_once() -> None:
    plain, slow = (
        dataclasses.replace(rates(packed_rows={"int8": 32}, flops_per_second=1e6, unpacked_per_second=each), name=CPU)
        for each in ({}, {"int8": 1e3})
    )
    weights = sum(each.out_features * each.in_features for each in LAYER.linears)
    for tokens, once in ((32, 0.0), (33, weights / 1e3), (500, weights / 1e3)):
        told = [layer_seconds(LAYER, "int8", each, Phase(1, tokens, 0)) for each in (plain, slow)]
        assert told[1] - told[0] == pytest.approx(once)


def test_every_expert_that_is_read_unpacks_its_own_weights() -> None:
    layer = Model.from_config(a_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)).layers[0]
    experts = [each for each in layer.linears if each.copies == 8]
    plain, slow = (rates(unpacked_per_second=each) for each in ({}, {"int8": 1e6}))
    for expert in experts:
        told = [linear_seconds(expert, "int8", each, 4096) for each in (plain, slow)]
        assert told[1] - told[0] == pytest.approx(8 * expert.out_features * expert.in_features / 1e6, rel=0.01)


def test_one_token_reads_only_its_own_experts() -> None:
    config = a_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    layer = Model.from_config(config).layers[0]
    one, many = (layer_seconds(layer, "dense", rates(flops_per_second=1e15), Phase(n, 1, 0)) for n in (1, 64))
    expert = 3 * 384 * 128 * 2 / (1e9 * 0.5)
    assert one < 2.5 * expert + 1e-3
    assert many > 7 * expert


def test_the_head_is_one_linear() -> None:
    assert Latencies().head(a_model(), rates(), 1).seconds == pytest.approx((512 * 128 + 640) * 2 / 0.5e9)


def test_a_hop_is_latency_and_bytes() -> None:
    link = LinkRate(gbps=8, latency_ms=2)
    assert hidden_states_seconds(a_model(), link, 1000, "bfloat16") == pytest.approx(0.002 + 256_000 / 1e9)


class OnlyPrefill:
    """A source that knows prefilling alone."""

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        return None if phase.decoding else Timed(1.0, "a table")

    def head(self, model: Model, rates: Rates, sequences: int) -> None:
        return None

    def step(self, model: Model, rates: Rates, phase: Phase) -> None:
        return None


def test_the_first_source_that_knows_answers_and_is_named() -> None:
    latencies = Latencies((OnlyPrefill(),))
    assert latencies.layer(LAYER, "dense", rates(), prefill_phase(LOAD, 1)) == Timed(1.0, "a table")
    assert latencies.layer(LAYER, "dense", rates(), decode_phase(LOAD, 1)).source.startswith("roofline, ")


def test_shards_hold_the_whole_layer_between_them_and_few_key_heads_several_times() -> None:
    layer = a_model(intermediate_size=512).layers[0]
    assert divisible(a_model(), 2)
    assert 2 * sharded(layer, 2).linear_parameters == layer.linear_parameters
    assert divisible(a_model(), 4)
    assert 4 * sharded(layer, 4).linear_parameters == layer.linear_parameters + 2 * 2 * 32 * 128  # keys and values
    assert not divisible(a_model(), 3)
    wide = {linear.name: linear.out_features for linear in sharded(LAYER, 4).linears}
    assert wide["up_proj"] == 128, "of 384 columns, 6 tiles of 64, the first device has two"


def test_a_group_of_two_exchanges_the_hidden_states_twice() -> None:
    link = LinkRate(gbps=8, latency_ms=1)
    steps = 4 * (0.001 + 128_000 / (RING_SHARE * 1e9))
    assert layer_collectives_seconds(a_model(), link, 2, 1000, "bfloat16") == pytest.approx(steps)
    assert layer_collectives_seconds(a_model(), link, 1, 1000, "bfloat16") == 0
