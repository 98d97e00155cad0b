"""Timing kernels: what is kept chooses, what is wrong is left out, and a layout that stands in place of others must win at every number of tokens."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.formats import kernels, measured
from strata_runtime.formats.gptq.kernels import GPTQ_KERNELS, HUMMING
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.kernels import PLANE_KERNELS, Kernel
from strata_runtime.formats.measured import TOKEN_COUNTS, steps_of
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.measuring import kernel_timing, timing
from strata_runtime.measuring.kernel_timing import CHOSEN_BY_TOKENS, Subject, fastest_kernels, keep, steps_with
from tests.runtime.formats.humming_libraries import Right, ZerosLessOne
from tests.runtime.formats.interpreted import products

torch.set_num_threads(1)
CPU = torch.device("cpu")
times = st.fixed_dictionaries(dict.fromkeys(TOKEN_COUNTS, st.floats(1e-6, 1.0)))


@pytest.fixture(autouse=True)
def small_and_its_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_timing, "CPU_FEATURES", 256)
    monkeypatch.setattr(timing, "ROUND_BUDGET_SECONDS", 0.0)
    measured._kept.cache_clear()
    yield
    measured._kept.cache_clear()


@given(seconds=st.dictionaries(st.sampled_from("abc"), times, min_size=1), whole=times)
def test_a_layout_in_place_of_others_is_taken_only_if_nothing_is_faster_at_any_number_of_tokens(
    seconds: dict[str, dict[int, float]], whole: dict[int, float]
) -> None:
    steps = steps_with(seconds, {"whole": whole})
    if all(whole[count] <= min(each[count] for each in seconds.values()) for count in TOKEN_COUNTS):
        assert steps == ((TOKEN_COUNTS[-1], "whole"),)
    else:
        assert steps == steps_of(seconds)
    assert steps_with(seconds, {}) == steps_of(seconds)
    assert steps_with({}, {}) == ()


def planes_weight(bits: int) -> PlanesWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (40, 200), generator=generator, dtype=torch.uint8)
    return PlanesWeight(pack_planes(codes, bits), torch.randn(40, 1 << bits, generator=generator).half(), 200)


def gptq_weight(bits: int) -> GptqWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (40, 200), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (40, 2), generator=generator, dtype=torch.uint8)
    return GptqWeight(pack_planes(codes, bits), torch.rand(40, 2, generator=generator).half(), zeros, 128, 200)


def on_a_gpu(table: tuple[Kernel[Any], ...], name: str) -> list[Kernel[Any]]:
    """The kernels that a GPU would run of a format, those in Triton by its interpreter."""
    interpreted = {"product": products.product, "dequantized": products.dequantized}
    return [
        dataclasses.replace(each, runs=lambda *_: True, run=interpreted[each.run.__name__])
        if "triton" in each.name
        else each
        for each in table
        if each.format == name and "native" not in each.name and "decoded" not in each.name
    ]


@pytest.mark.slow  # Triton's interpreter; test_triton_products.py holds what they compute
@pytest.mark.parametrize(
    ("table", "name", "weight"),
    [
        pytest.param(PLANE_KERNELS, "any4", planes_weight(4), id="any4"),
        pytest.param(PLANE_KERNELS, "any7", planes_weight(7), id="any7"),
        pytest.param(GPTQ_KERNELS, "gptq3", gptq_weight(3), id="gptq3"),
    ],
)
def test_kernels_of_gpus_agree_are_timed_and_chosen_by_what_was_measured(
    table: tuple[Kernel[Any], ...], name: Any, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_timing, "TOKEN_COUNTS", (1, 16))  # the interpreter is slow
    said: list[str] = []
    tokens = torch.randn(16, 200, generator=torch.Generator().manual_seed(0)).half()
    subject, able = Subject(tokens, weight, said.append), on_a_gpu(table, name)
    assert len(able) == 3
    assert subject.agreeing(able) == able, said
    seconds = {each.name: subject.seconds(each) for each in able}
    measured.save({name: steps_with(seconds, {})}, torch.float16)
    for count in (1, 16):
        chosen = kernels.select(tuple(able), name, tokens[:count], weight)
        assert seconds[chosen.name][count] == min(each[count] for each in seconds.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kernel_that_runs_here_agrees_with_the_reference_of_its_format(dtype: torch.dtype) -> None:
    """So what passes on a GPU is no more than other orders and roundings of the same sums."""
    said: list[str] = []
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 512**-0.5
    tried = 0
    for name, stored in kernel_timing._stored_forms(weight, dtype, gptq=True):
        tokens = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
        of_format = [each for table in CHOSEN_BY_TOKENS for each in table if each.format == name]
        able = [each for each in of_format if each.runs(tokens, stored)]
        assert Subject(tokens, stored, said.append).agreeing(able) == able, said
        tried += len(able) - 1
    assert tried >= 4


def test_a_kernel_that_is_wrong_or_fails_is_left_out_and_said() -> None:
    def wrong(tokens: torch.Tensor, weight: PlanesWeight) -> torch.Tensor:
        return tokens @ weight.dequantized().roll(1, dims=1).half().t()

    def failing(tokens: torch.Tensor, weight: PlanesWeight) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    said: list[str] = []
    subject = Subject(torch.randn(256, 200).half(), planes_weight(4), said.append)
    reference = [each for each in PLANE_KERNELS if each.format == "any4"][-1]
    others = [dataclasses.replace(reference, name=run.__name__, run=run) for run in (wrong, failing, reference.run)]
    assert subject.agreeing([*others, reference]) == [others[-1], reference]
    assert said[0].startswith("wrong of any4 is left out: it computes something else for 1 tokens")
    assert said[1].startswith("failing of any4 is left out: it failed: RuntimeError: no kernel image")


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_what_a_processor_keeps_chooses_among_its_own_kernels(compute: Any) -> None:
    said: list[str] = []
    keep("cpu", compute, None, said.append)
    assert said[-1].startswith("kept in ")
    dtype = getattr(torch, compute)
    found = {name: measured.fastest(name, dtype, 1) for name in ("int8", "any4", "gptq4")}
    names = {each.name for table in CHOSEN_BY_TOKENS for each in table}
    assert all(name in names or name is None for name in found.values())
    assert found["any4"] in {"any4-native", "any4-decoded", None}
    assert found["gptq4"] is None  # nothing to choose from


def test_a_library_that_is_right_is_timed_and_one_that_is_wrong_never_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timing, "CHOSEN_BY_TOKENS", (GPTQ_KERNELS,))
    monkeypatch.setattr(kernel_timing, "MAKERS", {})
    said: list[str] = []
    library = Right()
    found = fastest_kernels(CPU, "float16", library, said.append)
    assert library.products
    assert found == dict.fromkeys(("gptq2", "gptq3", "gptq4", "gptq8"), ((TOKEN_COUNTS[-1], HUMMING),))
    assert len(said) == 1
    assert fastest_kernels(CPU, "float16", ZerosLessOne(), said.append) == {}
    assert f"{HUMMING} of gptq4 is left out: it computes something else for 1 tokens" in "\n".join(said)
    assert fastest_kernels(CPU, "float32", Right(), said.append) == {}


def test_a_folder_that_cannot_be_written_is_said_and_survived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(kernel_timing, "CHOSEN_BY_TOKENS", ())
    said: list[str] = []
    keep("cpu", "float32", None, said.append)
    assert "not kept" in said[-1]


def test_the_command_measures_a_processor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_timing, "CHOSEN_BY_TOKENS", ())
    assert kernel_timing.main(["--device", "cpu", "--compute-type", "float32"]) == 0
    assert "kept in" in capsys.readouterr().err


def test_a_missing_gpu_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel_timing.main(["--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err
