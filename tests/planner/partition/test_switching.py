"""Seconds of strategies, and the lengths at which one gives way to the next."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.strategies import MEGATRON_ONLY, STRATEGIES, StrategyName, strategy_for
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, Rates
from strata_planner.errors import ModelError, WorkloadError
from strata_planner.partition.naming import find_strategies
from strata_planner.partition.seconds import Group, layer_seconds
from strata_planner.partition.states import Collective
from strata_planner.partition.switching import model_seconds, strategy_table
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import Model
from tests.laws import share
from tests.planner.builders import a_model

MODELS = Path(__file__).parents[3] / "examples" / "models"


def a_group(device: str = "L4", gigabytes_per_second: float = 4.2, **changes: object) -> Group:
    rates = Rates(catalogue().profile(device), "float16", 16, device)
    group = Group(rates, LinkRate(gbps=8 * gigabytes_per_second, latency_ms=0.01), 4)
    return replace(group, **changes)  # type: ignore[arg-type]


def the(name: str) -> Model:
    return Model.from_folder(MODELS / name, for_serving=False)


@pytest.mark.parametrize("format_name", ["dense", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "opt-30b"])
@pytest.mark.parametrize("tokens", [1, 100, 8192])
def test_megatron_computes_what_the_roofline_says_of_its_shard(name: str, format_name: FormatName, tokens: int) -> None:
    model, group = the(name), a_group(format_name=format_name)
    layer = model.layers[0]
    strategy = find_strategies(gated="llama" in name).strategies["megatron"]
    seconds = layer_seconds(strategy, layer, model.hidden_size, group, tokens)
    phase = Phase(1, tokens, tokens / 2)
    expected = Roofline().layer(sharded(layer, group.degree), format_name, group.rates, phase).seconds
    assert seconds.compute == pytest.approx(expected, rel=1e-12)
    assert seconds.gathers == 0
    assert seconds.total == seconds.compute + seconds.activations


@given(tokens=st.integers(1, 100_000), overlap=st.floats(0, 1))
def test_overlap_hides_gathers_and_nothing_else(tokens: int, overlap: float) -> None:
    model = a_model(num_attention_heads=4, num_key_value_heads=4)
    for name in STRATEGIES:
        strategy = find_strategies(gated=True).strategies[name]
        waited = layer_seconds(strategy, model.layers[0], model.hidden_size, a_group(), tokens)
        hidden = layer_seconds(strategy, model.layers[0], model.hidden_size, a_group(overlap=overlap), tokens)
        assert hidden.total == pytest.approx(waited.total - min(waited.gathers, overlap * waited.compute))
        assert (waited.gathers > 0) == (name == "weight-gathered")


def test_a_collective_that_reaches_half_the_link_takes_twice_its_transfer() -> None:
    model = the("llama-2-7b")
    strategy = find_strategies(gated=True).strategies["weight-gathered"]
    group = a_group(link=LinkRate(gbps=32, latency_ms=0))
    halved = replace(group, link_shares={Collective.ALL_GATHER: 0.5})
    whole, slower = (layer_seconds(strategy, model.layers[0], 4096, each, 4096) for each in (group, halved))
    assert slower.gathers == pytest.approx(2 * whole.gathers)
    assert slower.activations == pytest.approx(1.5 * whole.activations)  # a reduce-scatter and an all-gather


@settings(deadline=None, max_examples=share(40))
@given(tokens=st.integers(1, 60_000), bandwidth=st.floats(1, 300), overlap=st.sampled_from([0.0, 0.5, 1.0]))
def test_the_table_names_the_fastest(tokens: int, bandwidth: float, overlap: float) -> None:
    model, group = the("llama-2-7b"), a_group(gigabytes_per_second=bandwidth, overlap=overlap)
    table = strategy_table(model, group, 60_000)
    seconds = model_seconds(model, group)
    chosen = strategy_for(table, tokens, decoding=False)
    assert seconds(chosen, tokens) <= min(seconds(name, tokens) for name in STRATEGIES) * (1 + 1e-6)
    starts = [start for start, _ in table]
    assert starts[0] == 1
    assert starts == sorted(set(starts))
    assert all(first[1] != second[1] for first, second in pairwise(table))


@pytest.mark.parametrize("bandwidth", [4.2, 9.0, 32.0])
def test_a_switch_is_at_the_first_length_that_gains(bandwidth: float) -> None:
    model, group = the("llama-2-7b"), a_group(gigabytes_per_second=bandwidth)
    seconds = model_seconds(model, group)
    table = strategy_table(model, group, 60_000)
    assert len(table) > 1
    for (_, before), (start, after) in pairwise(table):
        assert seconds(after, start) < seconds(before, start)
        assert seconds(after, start - 1) >= seconds(before, start - 1)


def test_decoding_runs_megatron_whatever_the_table_says() -> None:
    table = ((1, "megatron"), (64, "projection-replicated"), (20_000, "weight-gathered"))
    lengths: dict[int, StrategyName] = {
        1: "megatron",
        63: "megatron",
        64: "projection-replicated",
        20_001: "weight-gathered",
    }
    for tokens, name in lengths.items():
        assert strategy_for(table, tokens, decoding=False) == name
        assert strategy_for(table, tokens, decoding=True) == "megatron"


@pytest.mark.parametrize("bandwidth", [4.0, 5.0, 8.0, 12.0])
def test_switches_of_7b_on_four_l4_lie_where_the_paper_measured_them(bandwidth: float) -> None:
    """DynPart, table A.1: Megatron at 1, not at 1,024; WeightGathered at 32,384, not at 16,192. No bandwidth is fitted."""
    table = strategy_table(the("llama-2-7b"), a_group(gigabytes_per_second=bandwidth), 1 << 17)
    assert [name for _, name in table] == list(STRATEGIES)
    assert 1 < table[1][0] <= 1024
    assert 16_192 < table[2][0] <= 32_384


def test_nvlink_never_replicates_the_projection() -> None:
    table = strategy_table(the("llama-2-70b"), a_group("A100-80GB", 200), 1 << 17)
    assert "projection-replicated" not in [name for _, name in table]
    assert strategy_for(table, 32_384, decoding=False) == "megatron"


def test_layers_without_a_choice_run_megatron() -> None:
    experts = a_model(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert strategy_table(experts, a_group(), 4096) == MEGATRON_ONLY
    odd = a_model(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    assert strategy_table(odd, a_group(), 4096) == MEGATRON_ONLY
    with pytest.raises(ModelError, match="6 heads cannot be dealt to 4"):
        model_seconds(odd, a_group())("megatron", 1)


def test_malformed_questions_are_refused() -> None:
    with pytest.raises(WorkloadError, match="at least 2"):
        a_group(degree=1)
    with pytest.raises(WorkloadError, match=r"overlap 1\.5"):
        a_group(overlap=1.5)
    with pytest.raises(WorkloadError, match="at least 1"):
        strategy_table(the("llama-2-7b"), a_group(), 0)
