"""A stage that is loaded onto a CUDA device, through page-locked memory, has the weights of one on a CPU."""

from pathlib import Path

import pytest
import torch

from strata_planner.contract.formats import FormatName
from strata_runtime.loading.load import load_stage
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import CPU, roles

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["int8", "any3", "any6"])
@pytest.mark.parametrize("copy", [False, True], ids=["on the fly", "from the copy"])
def test_weights_are_those_of_a_load_onto_the_cpu(name: FormatName, copy: bool, tmp_path: Path) -> None:  # noqa: FBT001
    model = make_tiny_model(tmp_path, "llama")
    if copy:
        write_artefact(model)
    role = roles(model, 1, formats=[name] * 6)[0]
    here = load_stage(role, model, lambda *_: None, CPU)
    there = load_stage(role, model, lambda *_: None, torch.device("cuda"))
    for layer in range(6):
        for key, linear in here.linears(layer).items():
            moved = there.linears(layer)[key]
            assert next(moved.buffers()).is_cuda
            torch.testing.assert_close(moved.dequantized().cpu(), linear.dequantized(), atol=1e-6, rtol=1e-5)  # type: ignore[operator]
