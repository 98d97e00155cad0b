"""The kernels compile to machine code for GPUs that are not here, keep to their registers, and pass no value through shared memory.

In a process of its own: where the interpreter has taken the kernels, nothing can compile them.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import dataclasses, json, sys
from benchmarks.gpu_code import compile_product
print(json.dumps([dataclasses.asdict(compile_product(*case)) for case in json.loads(sys.argv[1])]))
"""
CASES = (("any", 4, 80), ("any", 4, 90), ("any", 8, 90), ("gptq", 4, 90))

Code = dict[str, Any]


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Code]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


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
