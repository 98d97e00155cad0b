"""The benchmark against published measurements: which loads it reads, its clients, and when a load contradicts itself."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import silicon
from benchmarks.reference import silicon_samples
from benchmarks.reference.silicon_samples import MODELS, TUNED_ON, model_of, samples
from benchmarks.silicon import Cell, busy_with_prompts, drawn, rows
from strata_planner.costs.operators import OperatorTables
from strata_planner.costs.source import Timed

MEASURED = {
    "id": "one", "backend": "vllm", "backend_version": "0.10", "model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm",
    "mode": "agg", "isl": "1024", "osl": "100", "gemm_quant_mode": "fp8", "batch_size": "4", "tp_size": "2",
    "silicon_ttft_ms": "100", "silicon_tpot_ms": "20",
}  # fmt: skip
LEFT_OUT = {
    "disaggregated": {"mode": "disagg"},
    "another system": {"system": "gb300"},
    "experts": {"model_path": "openai/gpt-oss-120b"},
    "four bits": {"gemm_quant_mode": "nvfp4"},
    "nothing measured": {"silicon_tpot_ms": ""},
}


@given(shortest=st.floats(0.1, 1), seed=st.integers(0, 99))
def test_lengths_are_drawn_from_the_shortest_to_the_nominal(shortest: float, seed: int) -> None:
    for each in drawn(20, 1000, 100, shortest, seed):
        assert int(1000 * shortest) <= each.prompt_tokens <= 1000
        assert int(100 * shortest) <= each.output_tokens <= 100


def read(
    monkeypatch: pytest.MonkeyPatch, *measured: dict[str, str]
) -> tuple[list[silicon_samples.Sample], dict[str, int]]:
    monkeypatch.setattr(silicon_samples, "_rows", lambda: iter(measured))
    return samples()


def test_a_measured_load_is_read_with_how_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    [sample], left_out = read(monkeypatch, MEASURED)
    assert not left_out
    assert (sample.device, sample.format_name, sample.kv_bits, sample.framework) == ("H100", "fp8_a8", 8, "vllm")
    assert (sample.shortest, sample.step_tokens, sample.held_out) == (0.8, 8192, True)
    [trtllm], _ = read(monkeypatch, MEASURED | {"backend": "trtllm"})
    assert trtllm.step_tokens == 16384
    [looked_at], _ = read(monkeypatch, MEASURED | {"model_path": TUNED_ON, "gemm_quant_mode": ""})
    assert (looked_at.held_out, looked_at.kv_bits, looked_at.shortest) == (False, 16, 1.0)


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_the_tables_do_not_cover_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    covered, left_out = read(monkeypatch, MEASURED | LEFT_OUT[case])
    assert not covered
    assert list(left_out.values()) == [1]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_published_size(name: str) -> None:
    billions = {"Qwen3-32B": 32.8, "70B": 70.6, "8B": 8.03}
    size = next(value for part, value in billions.items() if part in name)
    assert model_of(name).parameters == pytest.approx(size * 1e9, rel=0.01)


def test_a_load_whose_prompts_alone_take_longer_than_it_lasted_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four requests in flight for 1.88 s each are 2.13 a second; of prompts that take half a second, that is 1.06 of the time."""
    [sample], _ = read(monkeypatch, MEASURED)
    exact = replace(sample, shortest=1.0, tensor_parallel=1, ttft_ms=100, tpot_ms=18)
    layers = model_of(sample.model).num_layers

    def layer(self: OperatorTables, *_: Any) -> Timed:
        return Timed(
            {"vllm": 0.5}.get(str(self.engine), 0.6) * 16 / layers, "made"
        )  # 16 prompts of 1,024 tokens at once

    monkeypatch.setattr(OperatorTables, "layer", layer)
    share = busy_with_prompts(exact, OperatorTables(silicon.Path("nowhere"), "1"))
    assert share == pytest.approx(4 / (0.1 + 99 * 0.018) * 0.5)


def test_only_held_out_loads_that_can_be_true_count(monkeypatch: pytest.MonkeyPatch) -> None:
    [sample], _ = read(monkeypatch, MEASURED)
    wrong = replace(sample, model="nvidia/Llama-3.1-8B-Instruct-FP8")
    looked_at = replace(sample, model=TUNED_ON)
    cells = [
        Cell(sample, 20, 22, 100),
        Cell(sample, 20, 18, 100),
        Cell(wrong, 20, 40, 100),
        Cell(looked_at, 20, 60, 100),
    ]
    found = {row.name: row.value for row in rows(cells, [wrong.group])}
    assert found["silicon"] == pytest.approx(0.1)
    assert found["silicon_all"] == pytest.approx((0.1 + 0.1 + 1) / 3)
    assert found["silicon_tuned"] == pytest.approx(2)


def test_without_the_tables_the_benchmark_says_what_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OperatorTables, "installed", lambda: None)
    assert silicon.measure() == []
    assert "every row is skipped" in capsys.readouterr().err
