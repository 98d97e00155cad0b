"""Operator tables: made ones looked up by hand; with the package installed, the measured ones against what they must obey."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata_planner.contract.formats import FormatName
from strata_planner.costs import operators
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.operator_data import Table
from strata_planner.costs.operators import COLLECTIVES, SYSTEMS, OperatorTables
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.catalogue import catalogue
from strata_planner.question.model import Model
from tests.planner.builders import a_config, a_model

LAYER = a_model().layers[0]
RATES = Rates(catalogue().profile("H100"), "bfloat16", 16, "H100")
GEMM_MILLISECONDS = {"bfloat16": 4.0, "int8_wo": 2.0, "fp8": 1.0}
SCALE_SEARCH = 0.5
LAUNCH = 3e-6
BANDWIDTH = 0.8e12


def everywhere(milliseconds: float) -> list[tuple[float, ...]]:
    return [(k, m, milliseconds) for k in (1.0, 1e5) for m in (1.0, 1e5)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> OperatorTables:
    """Every GEMM alike, attention of a millisecond per sequence and, while prefilling, per token and per token squared."""

    def gemms(folder: Path, system: str, gemm_type: str, engine: str | None) -> Table | None:
        found = GEMM_MILLISECONDS.get(gemm_type)
        rows = [(n, k, m, found) for n in (1.0, 1e5) for k in (1.0, 1e5) for m in (1.0, 1e5)] if found else []
        return Table(Axis.of(rows), f"engine of {gemm_type}") if found else None

    def attentions(folder: Path, system: str, phase: str, kv_bits: int, engine: str | None) -> Table | None:
        if kv_bits == 8 and phase == "context":
            return None  # as on A100

        def value(batch: float, length: float) -> float:
            return batch if phase == "generation" else batch * (1 + length)

        rows = [(32, 2, 4, b, s, value(b, s)) for b in (1.0, 64.0) for s in (1.0, 64.0, 4096.0)]
        return Table(Axis.of(rows), "engine of attention")

    gpu = {"mem_bw": 1e12, "mem_bw_empirical_scaling_factor": 0.8, "mem_empirical_constant_latency": LAUNCH}
    monkeypatch.setattr(operators, "gemms", gemms)
    monkeypatch.setattr(operators, "attentions", attentions)
    monkeypatch.setattr(operators, "all_reduces", lambda *_: Table(Axis.of([(2, 1024, 3.0), (8, 1024, 9.0)]), "NCCL"))
    monkeypatch.setattr(operators, "engine_all_reduces", lambda *_: Table(Axis.of([(2, 1024, 1.0)]), "an engine"))
    monkeypatch.setattr(operators, "scale_searches", lambda *_: Table(Axis.of(everywhere(SCALE_SEARCH)), "engine"))
    monkeypatch.setattr(operators, "gpu", lambda *_: gpu)
    return OperatorTables(Path("nowhere"), "1.2")


def elementwise(tokens: int) -> float:
    return tokens * (8 * 128 + 2 * 384 + 384) * 2 / BANDWIDTH + 3 * LAUNCH


CASES: dict[str, tuple[FormatName, Phase, float]] = {
    "decoding": ("dense", Phase(3, 1, 100), 7 * 4e-3 + 3e-3),
    "fewer bits": ("int8", Phase(3, 1, 100), 7 * 2e-3 + 3e-3),
    "floats whose scales are found by rows": ("fp8_a8", Phase(3, 1, 100), 7 * 0.5e-3 + 3e-3),
    "a whole prompt": ("dense", Phase(2, 100, 50), 7 * 4e-3 + 2 * (100 + 100**2) * 1e-3),
    "its second half": ("dense", Phase(2, 50, 75), 7 * 4e-3 + 2 * (100 + 100**2 - 50 - 50**2) * 1e-3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_its_linears_its_attention_and_three_passes(made: OperatorTables, case: str) -> None:
    name, phase, seconds = CASES[case]
    answer = made.layer(LAYER, name, RATES, phase)
    assert answer is not None
    assert answer.seconds == pytest.approx(seconds + elementwise(phase.total_tokens))


@pytest.mark.parametrize("phase", [Phase(1, 1, 512), Phase(1, 4096, 2048)])
def test_a_format_without_a_table_is_scaled_by_the_rooflines_ratio(made: OperatorTables, phase: Phase) -> None:
    """Of wide linears: decoding reads their bytes, prefilling multiplies. Attention is the same at every format."""
    wide = {"hidden_size": 8192, "intermediate_size": 32768, "head_dim": 32}
    layer = a_model(num_attention_heads=256, num_key_value_heads=128, **wide).layers[0]
    dense, scaled = (made.layer(layer, name, RATES, phase) for name in ("dense", "int4"))
    assert dense is not None
    assert scaled is not None
    assert scaled.source == f"{dense.source}, int4 scaled from dense"
    shares = RATES.profile.decode_efficiency if phase.decoding else RATES.profile.prefill_efficiency
    bits = 4.25 / 16 if phase.decoding else 1  # a scale and a zero for each group of 128
    linears = 7 * GEMM_MILLISECONDS["bfloat16"] * 1e-3
    expected = linears * (bits * shares["dense"] / shares["int4"] - 1)
    assert scaled.seconds - dense.seconds == pytest.approx(expected, rel=0.02)


def test_a_layer_takes_at_least_its_launch(made: OperatorTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GEMM_MILLISECONDS, "bfloat16", 1e-9)
    monkeypatch.setattr(operators, "attentions", lambda *_: Table(Axis.of([(32, 2, 4, 1, 1, 1e-9)]), "engine"))
    answer = made.layer(LAYER, "dense", RATES, Phase(1, 1, 1))
    assert answer is not None
    assert answer.seconds == RATES.profile.layer_overhead_seconds


def test_eight_bit_keys_are_the_tables_floats(made: OperatorTables) -> None:
    eight = made.layer(LAYER, "dense", replace(RATES, kv_bits=8), Phase(3, 1, 100))
    assert eight == made.layer(LAYER, "dense", RATES, Phase(3, 1, 100))


def test_finding_a_scale_is_never_more_than_the_device_could_save(made: OperatorTables) -> None:
    """The tables of a GEMM and of its pass are read apart: their difference may say less than the peaks allow."""
    wide = a_model(
        hidden_size=8192, intermediate_size=65536, num_attention_heads=256, head_dim=32, num_key_value_heads=128
    )
    answer = made.layer(wide.layers[0], "fp8_a8", RATES, Phase(1, 8192, 4096))
    assert answer is not None
    peak = 8192 * wide.layers[0].linear_parameters / RATES.profile.flops_per_second
    assert answer.seconds > peak


def test_an_engine_multiplies_linears_of_one_input_at_once_and_launches_none(made: OperatorTables) -> None:
    engine = replace(made, engine="vllm")
    answer = engine.layer(LAYER, "dense", RATES, Phase(3, 1, 100))
    assert answer is not None
    assert answer.seconds == pytest.approx(4 * 4e-3 + 3e-3 + elementwise(3))


def test_an_engine_takes_no_time_to_launch(made: OperatorTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GEMM_MILLISECONDS, "bfloat16", 1e-9)
    monkeypatch.setattr(operators, "attentions", lambda *_: Table(Axis.of([(32, 2, 4, 1, 1, 1e-9)]), "engine"))
    answer = replace(made, engine="vllm").layer(LAYER, "dense", RATES, Phase(1, 1, 1))
    assert answer is not None
    assert answer.seconds == pytest.approx(elementwise(1), rel=1e-3)


def test_an_engine_sums_by_its_own_kernel(made: OperatorTables) -> None:
    runtime, engine = (each.all_reduce("H100", 2, 1024) for each in (made, replace(made, engine="vllm")))
    assert runtime is not None
    assert engine is not None
    assert (runtime.seconds, engine.seconds) == (3e-3, 1e-3)
    assert engine.source == "operator tables of aiconfigurator-core 1.2 as vllm runs them: h100_sxm, an engine"


def test_norms_of_queries_and_keys_are_two_passes_more(made: OperatorTables) -> None:
    with_norms = a_model(model_type="qwen3", head_dim=32).layers[0]
    plain, normed = (made.layer(each, "dense", RATES, Phase(3, 1, 100)) for each in (LAYER, with_norms))
    assert plain is not None
    assert normed is not None
    values = 3 * 2 * (LAYER.heads + LAYER.kv_heads) * LAYER.head_dim
    assert normed.seconds - plain.seconds == pytest.approx(2 * LAUNCH + 2 * values / BANDWIDTH)


def test_an_answer_names_package_system_and_engines(made: OperatorTables) -> None:
    answer = made.layer(LAYER, "int8", RATES, Phase(3, 1, 100))
    assert answer is not None
    assert (
        answer.source
        == "operator tables of aiconfigurator-core 1.2: h100_sxm, engine of int8_wo and engine of attention"
    )


def test_the_head_is_a_dense_linear(made: OperatorTables) -> None:
    answer = made.head(a_model(), RATES, 3)
    assert answer is not None
    assert answer.seconds == pytest.approx(4e-3)
    assert made.step(a_model(), RATES, Phase(1, 1, 1)) is None


def of_experts() -> Model:
    return Model.from_config(a_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))


UNKNOWN: dict[str, Callable[[OperatorTables], object]] = {
    "a format that neither its tables nor its profile have": lambda made: made.layer(
        LAYER, "w8a8", RATES, Phase(1, 1, 1)
    ),
    "experts": lambda made: made.layer(of_experts().layers[0], "dense", RATES, Phase(1, 1, 1)),
    "heads of another width": lambda made: made.layer(a_model(head_dim=80).layers[0], "dense", RATES, Phase(1, 1, 1)),
    "single precision": lambda made: made.layer(LAYER, "dense", replace(RATES, compute_type="float32"), Phase(1, 1, 1)),
    "its head": lambda made: made.head(a_model(), replace(RATES, compute_type="float32"), 1),
    "eight-bit keys that were not measured": lambda made: made.layer(
        LAYER, "dense", replace(RATES, kv_bits=8), Phase(1, 4, 2)
    ),
    "an unknown device": lambda made: made.layer(LAYER, "dense", replace(RATES, name="T4"), Phase(1, 1, 1)),
    "an unknown device's linear": lambda made: made.linear("T4", "dense", 8, 8, 1),
    "rates that the user gave": lambda made: made.layer(
        LAYER,
        "dense",
        replace(RATES, profile=msgspec.structs.replace(RATES.profile, source="measured")),
        Phase(1, 1, 1),
    ),
    "collectives of an unknown device": lambda made: made.all_reduce("T4", 2, 1024),
    "collectives of a number of devices": lambda made: made.all_reduce("H100", 3, 1024),
    "collectives over slower links": lambda made: made.all_reduce("A800-80GB", 2, 1024),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_says_nothing_about(made: OperatorTables, case: str) -> None:
    assert UNKNOWN[case](made) is None


def test_memory_that_the_user_gave_changes_no_rate(made: OperatorTables) -> None:
    less = replace(RATES, profile=msgspec.structs.replace(RATES.profile, memory_bytes=1))
    assert made.layer(LAYER, "dense", less, Phase(1, 1, 1)) is not None


def test_collectives_grow_in_proportion_beyond_the_table(made: OperatorTables) -> None:
    answer = made.all_reduce("H100", 8, 2048)
    assert answer is not None
    assert answer.seconds == pytest.approx(18e-3)


def test_a_folder_without_tables_knows_nothing(tmp_path: Path) -> None:
    assert OperatorTables(tmp_path, "1").layer(LAYER, "dense", RATES, Phase(1, 1, 1)) is None
    assert OperatorTables(tmp_path, "1").all_reduce("H100", 2, 8) is None


def test_every_system_is_a_device_of_the_catalogue() -> None:
    assert SYSTEMS.keys() | COLLECTIVES.keys() <= catalogue().devices.keys()


def test_choosing_the_tables_reads_none_of_them() -> None:
    """Starting a command must stay fast: no table, no arrow, no pandas before a question is asked."""
    code = (
        "import sys; from strata_planner.costs.operators import OperatorTables; OperatorTables.installed(); "
        "sys.exit(bool({'pandas', 'pyarrow', 'aiconfigurator_core', 'scipy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def installed() -> OperatorTables:
    pytest.importorskip("pyarrow")
    tables = OperatorTables.installed()
    if tables is None:
        pytest.skip("aiconfigurator-core is not installed (extra 'profiles')")
    return tables


LLAMA_70B = Model.from_config({
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
})  # fmt: skip


def rates_of(device: str) -> Rates:
    return Rates(catalogue().profile(device), "bfloat16", 16, device)


def seconds(tables: OperatorTables, device: str, name: FormatName, phase: Phase) -> float:
    answer = tables.layer(LLAMA_70B.layers[0], name, rates_of(device), phase)
    assert answer is not None
    return answer.seconds


@pytest.mark.parametrize("device", SYSTEMS)
def test_nothing_is_faster_than_the_device(installed: OperatorTables, device: str) -> None:
    """A measured layer takes at least its operations at the peak rate and its bytes at the peak bandwidth."""
    layer, profile = LLAMA_70B.layers[0], catalogue().profile(device)
    prefill, decode = Phase(4, 512, 256), Phase(8, 1, 562)
    assert seconds(installed, device, "dense", prefill) > 2 * 2048 * layer.linear_parameters / profile.flops_per_second
    assert (
        seconds(installed, device, "dense", decode) > 2 * layer.linear_parameters / profile.bandwidth_bytes_per_second
    )


def test_weight_only_decodes_faster_and_prefills_no_faster(installed: OperatorTables) -> None:
    decode, prefill = (
        {name: seconds(installed, "A100-80GB", name, phase) for name in ("dense", "int8", "int4", "w8a8")}
        for phase in (Phase(1, 1, 512), Phase(16, 512, 256))
    )
    assert decode["int4"] < decode["int8"] < decode["dense"]
    assert prefill["w8a8"] < prefill["dense"] < prefill["int4"]


def test_a_published_figure_is_found_again(installed: OperatorTables) -> None:
    """GEMM 10240 x 8192 on A100: int4 weight-only 2.7 times as fast as bf16 at one token, 4 % slower at 8,192."""
    one, many = (
        [installed.linear("A100-80GB", name, 10240, 8192, rows) for name in ("dense", "int4")] for rows in (1, 8192)
    )
    assert all(one)
    assert all(many)
    ratios = [pair[0].seconds / pair[1].seconds for pair in (one, many) if pair[0] and pair[1]]
    assert ratios == [pytest.approx(2.7, abs=0.05), pytest.approx(1 / 1.04, abs=0.01)]


def test_a_source_travels_to_other_processes(installed: OperatorTables) -> None:
    again = pickle.loads(pickle.dumps(installed))
    assert again == installed
    assert seconds(again, "H100", "dense", Phase(1, 1, 8)) == seconds(installed, "H100", "dense", Phase(1, 1, 8))
