"""What the compiler makes of the GPU kernels, and how long that could take at best: no GPU is needed.

Called by `gpu_kernels`. Compiles each kernel for a kind of GPU with Triton, disassembles it with the tools that Triton ships, and counts the
instructions of the loop over tiles. The bounds are estimates, not measurements: each is the time of one unit if it were always busy.

| unit      | does on an SM of capability 8.0 or 9.0, per clock                          |
|-----------|----------------------------------------------------------------------------|
| issue     | 4 instructions of a warp                                                   |
| integers  | 2: byte permutes, logic, shifts, additions, comparisons, conversions       |
| shared    | one wavefront of 128 bytes; 32 lookups at random banks take 3.5 on average |
| memory    | what the device's memory gives                                             |
"""

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from strata_runtime.formats.planes.triton_products import OPTIONS, ROWS, SELECTED_BITS
from strata_runtime.kernels import triton_kernels

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGER = [
    "PRMT",
    "LOP3",
    "SHF",
    "IADD3",
    "SEL",
    "ISETP",
    "LEA",
    "VIADD",
    "VIMNMX",
    "SGXT",
    "PLOP3",
    "IABS",
    "I2FP",
    "F2FP",
    "MOV",
]
WAVEFRONTS = {"LDSM": 4.0, "LDGSTS": 4.0, "STS": 4.0, "STSM": 4.0, "LDS": 1.0}
WAVEFRONTS_OF_LOOKUP = 3.5
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9]*)([.\w]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")


@dataclass(frozen=True)
class Device:
    """Published figures of one kind of GPU; the memory's rate is what large reads reach of it."""

    name: str
    multiprocessors: int
    hertz: float
    bytes_per_second: float


H100 = Device("H100 SXM", 132, 1.755e9, 3.0e12)


@dataclass(frozen=True)
class Code:
    """One compiled kernel. counts: instructions of the loop over tiles, by their first word."""

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    counts: dict[str, int]
    weights: int  # that one thread multiplies each time round
    lookups: int  # of them, in shared memory

    @property
    def per_weight(self) -> float:
        return sum(self.counts.values()) / self.weights

    @property
    def integers_per_weight(self) -> float:
        return sum(self.counts.get(name, 0) for name in INTEGER) / self.weights

    @property
    def wavefronts_per_weight(self) -> float:
        plain = sum(count * WAVEFRONTS.get(name, 0.0) for name, count in self.counts.items())
        return (plain + self.lookups * (WAVEFRONTS_OF_LOOKUP - 1)) / self.weights

    def bounds_seconds(self, weights: int, stored_bytes: int, device: Device) -> dict[str, float]:
        """The least time of each unit for a matrix of so many weights."""
        warps_per_second = device.multiprocessors * device.hertz
        warps = weights / 32
        return {
            "issue": warps * self.per_weight / (4 * warps_per_second),
            "integers": warps * self.integers_per_weight / (2 * warps_per_second),
            "shared": warps * self.wavefronts_per_weight / warps_per_second,
            "memory": stored_bytes / device.bytes_per_second,
        }


def compile_product(kind: str, bits: int, capability: int = 90, *, tokens: int = 8) -> Code:
    """kind: "any" or "gptq" (groups of 128); for float16, whole tiles, aligned arguments."""
    selected = kind == "any" and bits <= SELECTED_BITS
    values: dict[str, Any] = {"table": "*i32" if selected else "*fp16"}
    constants: dict[str, Any] = {"BITS": bits, "ROWS": ROWS, "TOKENS": tokens, "FULL": True}
    if kind == "gptq":
        kernel, values = triton_kernels.group_product, {"scales": "*fp16", "zeros": "*u8", "groups": ("i32", "i32")}
        constants["SPLIT_GROUPS"] = False
    else:
        kernel = triton_kernels.selected_product if selected else triton_kernels.gathered_product
    signature: dict[str, Any] = {
        "tokens": "*fp16",
        "tokens_stride": "i32",
        "planes": ("*i32",) * bits,
        "row_words": "i32",
        "words": "i32",
        **values,
        "out": "*fp32",
        "sizes": ("i32", "i32", "i32"),
        "share": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    warps, stages = 2, (3 if kind == "gptq" or selected else 2)
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(list(signature).index(key),): each for key, each in constants.items()},
            _aligned(signature),
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, **OPTIONS},
    )
    weights = ROWS * 512 // (32 * warps)
    lookups = weights if kind == "any" and not selected else 0
    return _code(compiled, f"{kind}{bits}", capability, (weights, lookups))


def _aligned(signature: dict[str, Any]) -> dict[tuple[int, ...], list[list[object]]]:
    """What the launcher sees of the arguments of large matrices: all but the number of tokens and the share divide by 16."""
    found: dict[tuple[int, ...], list[list[object]]] = {}
    for place, (name, kind) in enumerate(signature.items()):
        if kind == "constexpr" or name == "share":
            continue
        parts = range(len(kind)) if isinstance(kind, tuple) else [None]
        for part in parts:
            if (name, part) != ("sizes", 0):
                found[(place,) if part is None else (place, part)] = [["tt.divisibility", 16]]
    return found


def _code(compiled: Any, name: str, capability: int, sizes: tuple[int, int]) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        text = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Code(
        kernel=name,
        capability=capability,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        counts=dict(collections.Counter(_loop(text)).most_common()),
        weights=sizes[0],
        lookups=sizes[1],
    )


def _loop(text: str) -> list[str]:
    """The instructions of the longest loop."""
    labels: dict[str, int] = {}
    names: list[str] = []
    longest = (0, 0)
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        if instruction := _INSTRUCTION.match(line):
            names.append(instruction[1])
            target = _TARGET.search(instruction[3])
            start = labels.get(target[0], len(names)) if target and instruction[1] == "BRA" else len(names)
            if len(names) - start > longest[1] - longest[0]:
                longest = (start, len(names))
    return names[longest[0] : longest[1]]


def _tool(*command: str) -> str:
    return subprocess.run([TOOLS / command[0], *command[1:]], check=True, capture_output=True, text=True).stdout
