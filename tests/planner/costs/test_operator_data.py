"""Finding and reading the package's files: made ones, as it lays them out."""

from pathlib import Path
from typing import Any

import pytest

from strata_planner.costs import operators
from strata_planner.costs.operator_data import (
    all_reduces,
    attentions,
    engine_all_reduces,
    gemms,
    newest_first,
    scale_searches,
)
from strata_planner.costs.operators import OperatorTables


def write(file: Path, **columns: list[Any]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), file)


def gemm(folder: Path, engine: str, version: str, kind: str, milliseconds: float) -> None:
    file = folder / "data" / "gpu" / "gemm" / engine / version / "gemm_perf.parquet"
    write(file, gemm_dtype=[kind], m=[1], n=[2], k=[3], latency=[milliseconds])


def test_versions_count_as_numbers(tmp_path: Path) -> None:
    for version in ("1.9.0", "1.10.0rc2", "1.10.0rc11"):
        (tmp_path / version).mkdir()
    assert [each.name for each in newest_first(tmp_path)] == ["1.10.0rc11", "1.10.0rc2", "1.9.0"]
    assert newest_first(tmp_path / "absent") == []


def test_the_first_engine_that_has_the_format_answers_with_its_newest_version(tmp_path: Path) -> None:
    gemm(tmp_path, "trtllm", "1.9.0", "bfloat16", 1)
    gemm(tmp_path, "trtllm", "1.10.0", "bfloat16", 2)
    gemm(tmp_path, "vllm", "0.9.0", "bfloat16", 3)
    gemm(tmp_path, "vllm", "0.9.0", "int4_wo", 4)
    dense, int4 = (gemms(tmp_path, "gpu", kind) for kind in ("bfloat16", "int8_wo"))
    assert dense is not None
    assert (dense.axes.at(2, 3, 1), dense.measured_with) == (2, "trtllm 1.10.0")
    assert int4 is None


def test_an_engine_that_is_asked_for_comes_first_and_the_others_after(tmp_path: Path) -> None:
    gemm(tmp_path, "trtllm", "1.9.0", "bfloat16", 1)
    gemm(tmp_path, "sglang", "0.5.0", "bfloat16", 2)
    own, other = (gemms(tmp_path, "gpu", "bfloat16", engine) for engine in ("sglang", "vllm"))
    assert own is not None
    assert other is not None
    assert (own.measured_with, other.measured_with) == ("sglang 0.5.0", "trtllm 1.9.0")


def test_keys_of_eight_bits_are_read_apart(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "gpu" / "attention" / "trtllm" / "1" / "generation_attention_perf.parquet",
        attn_dtype=["bfloat16"] * 2, kv_cache_dtype=["bfloat16", "fp8"], head_dim=[128] * 2, num_heads=[32] * 2,
        num_key_value_heads=[8] * 2, batch_size=[1] * 2, isl=[1] * 2, step=[511] * 2, latency=[6.0, 4.0],
    )  # fmt: skip
    tables = [attentions(tmp_path, "gpu", "generation", bits) for bits in (16, 8)]
    assert [table.axes.at(128, 4, 32, 1, 511) for table in tables if table] == [6, 4]


def test_an_engines_all_reduce_takes_no_longer_than_that_of_more_bytes(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "gpu" / "comm" / "vllm" / "1" / "custom_allreduce_perf.parquet",
        op_name=["all_reduce"] * 4, num_gpus=[2] * 4, message_size=[128, 256, 512, 256], latency=[3.0, 9.0, 5.0, 20.0],
    )  # fmt: skip
    table = engine_all_reduces(tmp_path, "gpu", "vllm")
    assert table is not None
    assert [table.axes.at(2, size) for size in (128, 256, 512)] == [3, 5, 5]


def test_what_finding_a_scale_takes_is_by_inputs_and_rows(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "gpu" / "quantize" / "trtllm" / "1" / "computescale_perf.parquet",
        quant_dtype=["fp8"] * 2, k=[8, 8], m=[1, 3], latency=[1.0, 2.0],
    )  # fmt: skip
    table = scale_searches(tmp_path, "gpu")
    assert table is not None
    assert table.axes.at(8, 2) == 1.5
    assert scale_searches(tmp_path, "another") is None


def test_attention_is_read_without_windows_and_prompts_per_token(tmp_path: Path) -> None:
    def attention(phase: str, tokens: int, step: int) -> None:
        write(
            tmp_path / "data" / "gpu" / "attention" / "vllm" / "1" / f"{phase}_attention_perf.parquet",
            attn_dtype=["bfloat16", "bfloat16", "fp8"], kv_cache_dtype=["bfloat16", "bfloat16", "fp8"],
            window_size=[0, 1024, 0], head_dim=[128] * 3, num_heads=[32] * 3, num_key_value_heads=[8] * 3,
            batch_size=[1] * 3, isl=[tokens] * 3, step=[step] * 3, latency=[6.0, 1.0, 1.0],
        )  # fmt: skip

    attention("context", 512, 0)
    attention("generation", 1, 511)
    context, generation = (attentions(tmp_path, "gpu", phase, 16) for phase in ("context", "generation"))
    assert context is not None
    assert generation is not None
    assert context.axes.at(128, 4, 32, 1, 512) == pytest.approx(6 / 512)
    assert generation.axes.at(128, 4, 32, 1, 511) == 6


def test_all_reduces_are_those_of_16_bits(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "gpu" / "comm" / "nccl" / "2.27" / "nccl_perf.parquet",
        op_name=["all_reduce", "all_gather", "all_reduce"], nccl_dtype=["half", "half", "int8"],
        num_gpus=[2, 2, 2], message_size=[1024] * 3, latency=[5.0, 1.0, 1.0],
    )  # fmt: skip
    table = all_reduces(tmp_path, "gpu")
    assert table is not None
    assert (table.axes.at(2, 1024), table.measured_with) == (5, "NCCL 2.27")


def test_without_the_package_there_are_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.util, "find_spec", lambda _: None)
    assert OperatorTables.installed() is None
