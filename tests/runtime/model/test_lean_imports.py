"""What a slot's process imports: none of what transformers asks for and this runtime never runs. Told by `sys.modules` of processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.architectures import make_tiny_model

UNUSED = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "sympy",
    "triton._C.libtriton",
)
LOAD_AND_STEP = """
import sys, pathlib, torch
import strata_runtime.slot.__main__
from strata_planner.contract.frames import Segment
from tests.runtime.loading.stages import Stages, roles
folder = pathlib.Path(sys.argv[1])
segment = Segment(sequence=0, start=0, length=3, sample=1)
Stages(folder, roles(folder, 2)).step({0: torch.tensor([1, 2, 3])}, [segment])
print(*sys.modules)
"""
COMPILE = """
import strata_runtime.model, torch
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
twice = torch.compile(lambda given: given * 2, backend="eager")
assert twice(torch.ones(1)).item() == 2
"""


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # a process each, which loads all that a slot does
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3_text", "qwen3_next"])
def test_a_loaded_stage_has_imported_no_compiler(tmp_path: Path, architecture: str) -> None:
    """Half of a slot's start, and more memory than all else that it imports beside torch."""
    imported = _run(LOAD_AND_STEP, str(make_tiny_model(tmp_path, architecture))).split()
    assert "transformers.modeling_utils" in imported
    assert [name for name in UNUSED if name in imported] == []


@pytest.mark.slow
def test_the_compiler_is_there_for_who_compiles() -> None:
    _run(COMPILE)
