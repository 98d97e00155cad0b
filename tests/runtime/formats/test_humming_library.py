"""humming-kernels itself, up to the launch: it takes what it is given, and its kernels compile for GPUs that are not here.

In a process of its own, where the library is told of a GPU and tensors are shapes alone. Skipped where the `cuda` extra is not installed.
"""

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from strata_runtime.formats.gptq.humming_kernels import INTERVAL_ENDS

pytestmark = pytest.mark.skipif(
    find_spec("humming") is None or torch.version.cuda is None,
    reason="humming-kernels (the `cuda` extra) is not installed",
)

SCRIPT = """
import contextlib, json, sys, types
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda *_: contextlib.nullcontext()
from humming.device import DeviceInfo, current_device
capability, cases, ends, compile_them = json.loads(sys.argv[1])
card = types.SimpleNamespace(
    index=0, name="not here", is_ppu=False, sm_count=132, max_threads_per_block=1024, max_threads_per_sm=2048,
    max_registers_per_sm=65536, sm_major=capability // 10, sm_minor=capability % 10, sm_version=capability,
    l2_cache_size=50 << 20, l2_cache_size_mb=50.0, default_smem_size=48 << 10, max_smem_size=227 << 10,
    max_smem_size_kb=227.0, memory_clock_khz=2619000, memory_bus_width=5120, sm_clock_khz=1755000,
    memory_bandwidth_gbps=3000.0, tensorcore_tops={"float16": 900.0, "bfloat16": 900.0},
)
info = object.__new__(DeviceInfo)
info._index, info._value, current_device._value = 0, card, card
DeviceInfo._instances[0] = info
from humming.kernel.humming import HummingKernel
from strata_runtime.formats.gptq import humming_kernels
humming_kernels.INTERVAL_ENDS = tuple(ends)
library = humming_kernels.installed()
assert not isinstance(library, str), library
made = []
HummingKernel.register_kernel = lambda self: made.append(self.kernel_filename) or setattr(self, "kernel_id", 0)
if not compile_them:
    HummingKernel.prepare = lambda self: setattr(self, "kernel_filename", "")
rows, columns, group = 384, 512, 64
answers = []
for bits, centered, dtype in cases:
    made.clear()
    dtype = getattr(torch, dtype)
    with FakeTensorMode():
        weight = humming_kernels.UniformWeight(
            torch.empty(rows, columns * bits // 32, dtype=torch.int32, device="cuda"),
            torch.empty(rows, columns // group, dtype=dtype, device="cuda"),
            None if centered else torch.empty(rows * bits // 32, columns // group, dtype=torch.int32, device="cuda"),
            bits,
            group,
        )
        parts, layout = library.repacked(weight)
    HummingKernel.prepare_kernels(layout.config.to_str(), None, layout.tuning, 0)
    held = {name: [str(part.dtype).removeprefix("torch."), part.nbytes] for name, part in parts.items()}
    answers.append([held, [each[:2] for each in json.loads(layout.tuning)], len(set(made)) if compile_them else len(made)])
print(json.dumps(answers))
"""
CASES = tuple(itertools.product((2, 3, 4, 8), (False, True), ("float16", "bfloat16")))


def ask(folder: Path, *question: object) -> list[tuple[dict[str, tuple[str, int]], list[list[int]], int]]:
    """For each case: the tensors of its layout by name, the intervals of tokens, how many kernels were made."""
    own = {"HUMMING_CACHE_DIR": f"{folder}/", "HUMMING_TMP_DIR": f"{folder}/", "HUMMING_DISABLE_PARALLEL_BUILD": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(question)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | own)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_it_takes_our_words_and_keeps_as_many_bytes(tmp_path: Path) -> None:
    answers = ask(tmp_path, 80, CASES, INTERVAL_ENDS, False)
    intervals = zip((0, *INTERVAL_ENDS[:-1]), (*INTERVAL_ENDS[:-1], 1 << 30), strict=True)
    expected = [list(each) for each in intervals]
    for (bits, centered, dtype), (parts, found, kernels) in zip(CASES, answers, strict=True):
        assert parts["weight"] == ["int32", 384 * 512 * bits // 8]
        assert parts["weight_scale"] == [dtype, 384 * 8 * 2]
        assert centered or parts["zero_point"][1] <= 384 * 8
        assert set(parts) == {"weight", "weight_scale", "locks"} | (set() if centered else {"zero_point"})
        assert found == expected
        assert 1 <= kernels <= len(INTERVAL_ENDS)


@pytest.mark.parametrize("capability", [80, 90])
def test_its_kernels_compile(capability: int, tmp_path: Path) -> None:
    cases = [(4, True, "float16"), (3, False, "bfloat16")]
    assert [kernels for _, _, kernels in ask(tmp_path, capability, cases, (8, 512), True)] == [2, 2]
