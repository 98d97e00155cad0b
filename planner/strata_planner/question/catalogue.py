"""The catalogue of device types: published rates, product labels, interconnects. Data in catalogue.yaml, with sources.

Read by `cluster` when it resolves a device's type. Knows no cluster and no model.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

import yaml

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import FormatName
from strata_planner.contract.values import Value, from_builtins
from strata_planner.question.reading import suggestion

CPU = "cpu"
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]|^[0-9.-]|^(null|true|false|yes|no|on|off|y|n)$", re.IGNORECASE)
# A profile with every field that is needed, as one line of YAML.
_EXAMPLE = (
    "profiles: {{{name}: {{type: {name}, memoryBytes: 48Gi, bandwidthBytesPerSecond: 800.0e+9, flopsPerSecond: 150.0e+12, "
    "float32FlopsPerSecond: 40.0e+12, decodeEfficiency: {{dense: 0.7, int8: 0.6, int4: 0.4, int3: 0.3}}, "
    "prefillEfficiency: {{dense: 0.6, int8: 0.5, int4: 0.5, int3: 0.4}}, layerOverheadSeconds: 0.00015, source: my datasheet}}}}"
)
_MIB = 1 << 20


class ArchitectureEfficiency(Value, frozen=True):
    """What kernels reach on a GPU architecture (assumed until measured)."""

    decode: dict[FormatName, float]
    prefill: dict[FormatName, float]
    layer_overhead_seconds: float


class Entry(Value, frozen=True):
    """One product as its datasheet describes it."""

    labels: tuple[str, ...]
    architecture: str
    compute_capability: str
    memory_mib: int
    bandwidth_gigabytes_per_second: float
    fp16_tflops: float
    fp32_tflops: float
    peer_gigabytes_per_second: float
    source: str


class CpuEntry(Value, frozen=True):
    """The assumed processor."""

    memory_mib: int
    bandwidth_gigabytes_per_second: float
    fp16_gflops: float
    fp32_gflops: float
    peer_gigabytes_per_second: float
    layer_overhead_seconds: float
    decode: dict[FormatName, float]
    prefill: dict[FormatName, float]


class Catalogue(Value, frozen=True):
    """`stand_ins`: a format whose shares no entry has -> the one whose shares it is taken to reach."""

    stand_ins: dict[FormatName, FormatName]
    architectures: dict[str, ArchitectureEfficiency]
    devices: dict[str, Entry]
    cpu: CpuEntry

    def name_of(self, type_or_label: str) -> str | None:
        """The catalogue name of a device type or product label; None when nothing is known about it.

        Capitals and the maker's prefix do not matter: nvidia-smi, device plugins and people write them differently.
        """
        wanted = _plain(type_or_label)
        if wanted == CPU:
            return CPU
        return next(
            (
                name
                for name, entry in self.devices.items()
                if wanted in {_plain(each) for each in (name, *entry.labels)}
            ),
            None,
        )

    def profile(self, name: str) -> DeviceProfile:
        """The published profile of a catalogue name, `cpu` included (that one is assumed)."""
        if name == CPU:
            return self._cpu_profile()
        entry = self.devices[name]
        efficiency = self.architectures[entry.architecture]
        return DeviceProfile(
            type=name,
            memory_bytes=entry.memory_mib * _MIB,
            bandwidth_bytes_per_second=entry.bandwidth_gigabytes_per_second * 1e9,
            flops_per_second=entry.fp16_tflops * 1e12,
            float32_flops_per_second=entry.fp32_tflops * 1e12,
            decode_efficiency=self.completed(efficiency.decode),
            prefill_efficiency=self.completed(efficiency.prefill),
            layer_overhead_seconds=efficiency.layer_overhead_seconds,
            source=f"published: {entry.source}; efficiencies assumed",
            compute_capability=entry.compute_capability,
        )

    def peer_bytes_per_second(self, name: str) -> float:
        """Between two devices of one node, one direction; devices that the catalogue lacks count as PCIe 3.0 x16."""
        if name == CPU:
            return self.cpu.peer_gigabytes_per_second * 1e9
        return self.devices[name].peer_gigabytes_per_second * 1e9 if name in self.devices else 16e9

    def completed(self, shares: dict[FormatName, float]) -> dict[FormatName, float]:
        """With the shares that stand in for formats that nobody measured on the device."""
        return {name: shares[base] for name, base in self.stand_ins.items() if base in shares} | shares

    def _cpu_profile(self) -> DeviceProfile:
        return DeviceProfile(
            type=CPU,
            memory_bytes=self.cpu.memory_mib * _MIB,
            bandwidth_bytes_per_second=self.cpu.bandwidth_gigabytes_per_second * 1e9,
            flops_per_second=self.cpu.fp16_gflops * 1e9,
            float32_flops_per_second=self.cpu.fp32_gflops * 1e9,
            decode_efficiency=self.completed(self.cpu.decode),
            prefill_efficiency=self.completed(self.cpu.prefill),
            layer_overhead_seconds=self.cpu.layer_overhead_seconds,
            source="assumed",
        )


def unknown_type(type_: str, others: Iterable[str] = ()) -> str:
    """What is wrong with a device type that nobody knows, and what to write into a cluster file. `others`: types with profiles there."""
    known = sorted({*catalogue().devices, CPU, *others})
    name = json.dumps(type_) if _NOT_PLAIN.search(type_) or not type_ else type_
    meant = suggestion(type_, known, what="types")
    guess = f" {meant}" if meant.endswith("?") else ""
    return (
        f"device type '{type_}' is unknown.{guess} The types here are {', '.join(known)}. A label of GPU feature discovery or of AMD's node "
        f"labeller does too. Or describe it in the cluster file by the figures of its datasheet: {_EXAMPLE.format(name=name)}"
    )


def _plain(label: str) -> str:
    return label.strip().replace(" ", "-").lower().removeprefix("nvidia-").removeprefix("tesla-")


@cache
def catalogue() -> Catalogue:
    text = resources.files("strata_planner").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    return from_builtins(yaml.safe_load(text), Catalogue)
