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

pytestmark = pytest.mark.slow  # `make check` runs it

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
ATTENTION = """
import json, sys
from dataclasses import replace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from strata_runtime.kernels import paged_attention
from strata_runtime.kernels.native_attention import Entries
from strata_runtime.model.kv.rounding import round_entries
from tests.runtime.kernels.paged_steps import PLAIN, PagedStep

class NoDevice:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", int(sys.argv[1]), 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

def compile_only(self, *arguments, warmup, **options):
    codes.append(run(self, *arguments, warmup=True, **options))

codes = []
driver.set_active(NoDevice())
run, JITFunction.run = JITFunction.run, compile_only
def attended(width, dtype, scores, bits=16):
    step = PagedStep([(700, 1), (3, 70)], heads=8, kv_heads=2, width=width, page_tokens=16, dtype=dtype)
    entries = step.entries()
    if bits == 8:
        (keys, own), (values, held) = round_entries(step.keys), round_entries(step.values)
        entries = Entries(keys, values, (own, held))
    paged_attention.attend(step.query, entries, step.tables(), 16, scores)
attended(128, torch.bfloat16, PLAIN)
attended(256, torch.bfloat16, replace(PLAIN, window=128, soft_cap=30.0, sinks=torch.ones(8)))
attended(128, torch.float16, replace(PLAIN, chunk=64, slopes=torch.ones(8)), bits=8)
attended(128, torch.float32, PLAIN)
print(json.dumps([[code.name, code.metadata.shared] for code in codes]))
"""
SHARED_BYTES = 99 << 10  # of a program on the GPUs that have least of it (8.6, 8.9)
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


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_over_pages_compiles_as_it_is_launched(capability: int, tmp_path: Path) -> None:
    codes = json.loads(run_in_its_own_process(ATTENTION, tmp_path, str(capability)))
    assert [name for name, _ in codes] == ["attend_tiles", "attend_tiles", "add_parts"] * 4
    assert all(shared <= SHARED_BYTES for _, shared in codes), codes
