"""The measured choice of kernels: the fastest at each number of tokens, borders between; another machine's table is not believed."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.precision import kernels, make_linear, measured
from strata_runtime.precision.kernels import GROUP_KERNELS
from strata_runtime.precision.measured import TOKEN_COUNTS, steps_of
from strata_runtime.precision.rounded_linear import GroupLinear

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
    threads = torch.get_num_threads()
    measured.save({"int4": ((64, "int4-dequantized"), (256, "absent"))}, torch.bfloat16, threads)
    assert kernels.select(GROUP_KERNELS, "int4", tokens, module.stored).name == "int4-dequantized"
    assert measured.fastest("int4", torch.bfloat16, 9999) == "absent"
    assert kernels.select(GROUP_KERNELS, "int4", tokens.expand(100, -1), module.stored).run is not None
    assert measured.fastest("int3", torch.bfloat16, 1) is None
    assert measured.fastest("int4", torch.float32, 1) is None


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', '{"key": {}, "steps": 3}'])
def test_a_file_that_does_not_read_or_is_of_another_machine_chooses_nothing(text: str) -> None:
    file = measured.save({"int4": ((1, "int4-packed"),)}, torch.bfloat16, torch.get_num_threads())
    assert measured.fastest("int4", torch.bfloat16, 1) == "int4-packed"
    file.write_text(text)
    measured._kept.cache_clear()
    assert measured.fastest("int4", torch.bfloat16, 1) is None
