"""The kernels compile to machine code for GPUs that are not here, keep to their registers, and pass no value through shared memory.

In a process of its own: where the interpreter has taken the kernels, nothing can compile them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import dataclasses, json, sys
from benchmarks.gpu_code import compile_product
print(json.dumps([dataclasses.asdict(compile_product(*case)) for case in json.loads(sys.argv[1])]))
"""
# Everything but the GPU: arguments are seen as on one, among them ones, of which Triton makes constants.
LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from strata_runtime.formats.planes import triton_products
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.weights import PlanesWeight

class NoDevice:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

def compile_only(self, *arguments, warmup, **options):
    return run(self, *arguments, warmup=True, **options)

driver.set_active(NoDevice())
run, JITFunction.run = JITFunction.run, compile_only
tokens = torch.ones(1, 1, dtype=torch.float16)
def planes(bits):
    return tuple(torch.zeros(1, 8, dtype=torch.uint8) for _ in range(bits))
for bits in (4, 8):
    weight = PlanesWeight(planes(bits), torch.ones(1, 1 << bits, dtype=torch.float16), 1)
    triton_products.product(tokens, weight)
weight = GptqWeight(planes(4), torch.ones(1, 1).half(), torch.ones(1, 1, dtype=torch.uint8), 1, 1)
triton_products.decoded(weight, torch.float16)
sums = torch.ones(3, 1, 1)
triton_products._added(sums, torch.float16)
"""
CASES = (("any", 4, 80), ("any", 4, 90), ("any", 8, 90), ("gptq", 4, 90))

Code = dict[str, Any]


def run_in_its_own_process(script: str, folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Code]:
    answer = run_in_its_own_process(SCRIPT, tmp_path_factory.mktemp("triton"), json.dumps(CASES))
    return dict(zip(CASES, json.loads(answer), strict=True))


@pytest.mark.parametrize("capability", [80, 90])
def test_four_bits_are_looked_up_in_registers(codes: dict[tuple[str, int, int], Code], capability: int) -> None:
    code = codes["any", 4, capability]
    counts, weights = code["counts"], code["weights"]
    assert code["stack_bytes"] == 0, "spilled registers"
    assert counts["PRMT"] == 2 * weights, "two byte permutes for a weight of four bits"
    assert counts["HMMA"] * 8 == weights, "eight weights of a thread in one instruction of the tensor cores"
    assert "STS" not in counts, "values pass through shared memory"
    assert sum(counts.values()) <= 4.2 * weights


@pytest.mark.parametrize("case", [("any", 8, 90), ("gptq", 4, 90)], ids=str)
def test_the_other_kernels_compile(codes: dict[tuple[str, int, int], Code], case: tuple[str, int, int]) -> None:
    assert "HMMA" in codes[case]["counts"]
    assert codes[case]["stack_bytes"] <= 1024


def test_a_matrix_of_one_weight_compiles_as_it_is_launched(tmp_path: Path) -> None:
    run_in_its_own_process(LAUNCHES, tmp_path)
