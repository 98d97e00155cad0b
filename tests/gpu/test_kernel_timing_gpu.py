"""The measured choice of kernels on a GPU: everything that runs there agrees with its reference, is timed, and is taken as measured."""

from pathlib import Path

import pytest
import torch

from strata_planner.contract.formats import ANY_PRECISION, GPTQ, ComputeType
from strata_runtime.formats import COMPUTE_DTYPES, measured
from strata_runtime.formats.gptq.kernels import HUMMING
from strata_runtime.measuring import kernel_timing, measure

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_no_kernel_is_left_out_and_every_format_with_a_choice_is_measured(
    compute: ComputeType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    kernel_timing.keep("cuda", compute, None, said.append)
    assert not [line for line in said if "left out" in line]
    device = torch.device("cuda", 0)
    for name in (*ANY_PRECISION.values(), *GPTQ.values()):
        chosen = measured.fastest(name, COMPUTE_DTYPES[compute], 1, device)
        assert chosen is not None, name
        assert chosen != HUMMING


@pytest.mark.timeout(900)
def test_the_whole_measurement_keeps_a_table_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure._keep_kernels_of_gpu("float16")
    said = capfd.readouterr().err
    with capfd.disabled():
        print("\n" + said)  # noqa: T201 -- what was left out, and why, is worth reading
    assert "trying again" not in said
    assert len(list((tmp_path / "strata").glob("kernels-*.json"))) == 1
