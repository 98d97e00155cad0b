"""The measured choice of kernels: the fastest at each number of tokens, borders between; another device's table is not believed."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from strata_planner.contract.formats import FormatName
from strata_planner.costs.working import PACKED_ROWS
from strata_runtime.formats import kernels, make_linear, measured
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS
from strata_runtime.formats.measured import TOKEN_COUNTS, steps_of
from strata_runtime.formats.rounded.rounded_linear import GroupLinear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels import native_dense

times = st.fixed_dictionaries(dict.fromkeys(TOKEN_COUNTS, st.floats(1e-6, 1.0)))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._kept.cache_clear()
    yield
    measured._kept.cache_clear()


@given(seconds=st.dictionaries(st.sampled_from("abc"), times, min_size=1))
def test_at_every_measured_number_of_tokens_the_fastest_is_taken(seconds: dict[str, dict[int, float]]) -> None:
    steps = steps_of(seconds)
    assert [most for most, _ in steps] == sorted({most for most, _ in steps})
    assert all(one != following for (_, one), (_, following) in pairwise(steps))
    for count in TOKEN_COUNTS:
        name = next((name for most, name in steps if count <= most), steps[-1][1])
        assert seconds[name][count] == min(each[count] for each in seconds.values())


def test_borders_lie_between_the_numbers_that_were_timed() -> None:
    assert steps_of({"few": {1: 1.0, 16: 2.0}, "many": {1: 2.0, 16: 1.0}}) == ((4, "few"), (16, "many"))


def test_what_was_kept_chooses_and_only_among_kernels_that_run() -> None:
    module = make_linear(torch.randn(64, 128), None, "int4", torch.bfloat16)
    assert isinstance(module, GroupLinear)
    tokens = torch.randn(1, 128).to(torch.bfloat16)
    measured.save({"int4": ((64, "int4-dequantized"), (256, "absent"))}, torch.bfloat16)
    assert kernels.select(GROUP_KERNELS, "int4", tokens, module.stored).name == "int4-dequantized"
    assert measured.fastest("int4", torch.bfloat16, 9999) == "absent"
    assert kernels.select(GROUP_KERNELS, "int4", tokens.expand(100, -1), module.stored).run is not None
    assert measured.fastest("int3", torch.bfloat16, 1) is None
    assert measured.fastest("int4", torch.float32, 1) is None


def test_a_processor_packs_rows_up_to_where_what_was_measured_brings_weights_back() -> None:
    packs = native_dense.takes(torch.bfloat16, torch.device("cpu"))
    always: dict[FormatName, int] = {"dense": kernels.ANY_TOKENS, "int8": kernels.ANY_TOKENS} if packs else {}
    assert kernels.packed_rows(torch.bfloat16, torch.get_num_threads()) == always
    steps: dict[FormatName, measured.Steps] = {
        "int8": ((256, "int8-converted"),),
        "int4": ((32, "int4-packed"), (256, "int4-dequantized")),
        "any4": ((256, "any4-native"),),  # also beyond
        "w8a8": ((256, "w8a8-native"),),  # has no limit of its own
    }
    measured.save(steps, torch.bfloat16)
    expected = {"int8": 0, "int4": 32, "any4": kernels.ANY_TOKENS} | always
    assert kernels.packed_rows(torch.bfloat16, torch.get_num_threads()) == expected
    assert kernels.packed_rows(torch.float32, torch.get_num_threads()) == {}


def test_the_planner_knows_the_kernels_own_limits() -> None:
    on_cpu = [
        kernel
        for table in (CHANNEL_KERNELS, GROUP_KERNELS, PLANE_KERNELS)
        for kernel in table
        if "triton" not in kernel.name
    ]
    for name in {kernel.format for kernel in on_cpu if kernel.arithmetic == "16-bit activations"}:
        assert PACKED_ROWS[name] == min(kernel.most_tokens for kernel in on_cpu if kernel.format == name)


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', '{"key": {}, "steps": 3}'])
def test_a_file_that_does_not_read_or_is_of_another_machine_chooses_nothing(text: str) -> None:
    file = measured.save({"int4": ((1, "int4-packed"),)}, torch.bfloat16)
    assert measured.fastest("int4", torch.bfloat16, 1) == "int4-packed"
    file.write_text(text)
    measured._kept.cache_clear()
    assert measured.fastest("int4", torch.bfloat16, 1) is None


GPU = torch.device("cuda", 0)


@dataclasses.dataclass
class Card:
    """What torch and the package registry say of a GPU that is not here."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    humming: str = "0.1.19"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    held = Card()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: held.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: held.capability)
    monkeypatch.setattr(measured, "gpu_libraries", lambda: {"triton": "3.9.0", "humming-kernels": held.humming})
    return held


def test_a_gpus_table_is_believed_for_its_name_capability_and_libraries_alone(card: Card) -> None:
    measured.save({"any4": ((256, "any4-dequantized"),)}, torch.float16, GPU)
    assert measured.fastest("any4", torch.float16, 1, GPU) == "any4-dequantized"
    assert measured.fastest("any4", torch.bfloat16, 1, GPU) is None
    assert measured.fastest("any4", torch.float16, 1) is None  # the processor beside it
    for change in ({"name": "NVIDIA L4"}, {"capability": (8, 9)}, {"humming": ""}):
        kept = dataclasses.asdict(card)
        vars(card).update(change)
        measured._kept.cache_clear()
        assert measured.fastest("any4", torch.float16, 1, GPU) is None
        vars(card).update(kept)
    measured._kept.cache_clear()
    assert measured.fastest("any4", torch.float16, 1, GPU) == "any4-dequantized"


def test_threads_of_the_processor_do_not_matter_to_a_gpu(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.save({"any4": ((1, "any4-triton"),)}, torch.float16, GPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert measured.fastest("any4", torch.float16, 1, GPU) == "any4-triton"


@pytest.mark.parametrize(
    ("count", "chosen"), [(1, "any4-triton"), (16, "any4-triton-dequantized"), (99, "any4-dequantized")]
)
def test_on_a_gpu_the_table_chooses_among_the_kernels_of_gpus(
    card: Card, count: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tuple(
        dataclasses.replace(each, runs=lambda tokens, _: tokens.is_cuda) if "-triton" in each.name else each
        for each in PLANE_KERNELS
    )
    with FakeTensorMode():
        tokens = torch.empty(count, 128, dtype=torch.float16, device="cuda")
        planes = tuple(torch.empty(8, 16, dtype=torch.uint8, device="cuda") for _ in range(4))
        weight = PlanesWeight(planes, torch.empty(8, 16, dtype=torch.float16, device="cuda"), 128)
    by_limits = "any4-triton" if count <= 16 else "any4-triton-dequantized"
    assert kernels.select(table, "any4", tokens, weight).name == by_limits
    steps = ((8, "any4-triton"), (31, "any4-triton-dequantized"), (256, "any4-dequantized"))
    measured.save({"any4": steps}, torch.float16, GPU)
    assert kernels.select(table, "any4", tokens, weight).name == chosen
