"""What a device can do, in the few numbers that a roofline needs. Made by the catalogue or by measuring, read by the costs.

The runtime measures the CPU it runs on (`python -m strata_runtime.measuring.measure`) and prints a DeviceProfile; the planner's
catalogue holds published ones.
"""

from typing import Any

import msgspec

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.values import Value


def is_processor(device_type: str) -> bool:
    """Whether a device of this type is cores of a machine, whose memory is host memory."""
    return device_type.lower().startswith("cpu")


class DeviceProfile(Value, frozen=True):
    """Rates of one device. Time of a linear: max(operations / (flops * prefill efficiency), bytes / (bandwidth * decode efficiency)).

    `layer_overhead_seconds`: launching one decoder layer, whatever its size; `step_overhead_seconds`: what a step takes on a
    stage beside its layers (planning its batch, reading and writing its frame, messages). `sequence_layer_seconds`, `sequence_step_seconds`:
    what each decoding sequence adds to both, whatever its keys; `sampled_row_seconds`: choosing a token. Keys and values are read at
    `attention_bytes_per_second`, 0: as dense weights; attention of prompts multiplies at `attention_flops_per_second`, 0: as dense products.
    Beside products a prompt's rows, inputs and outputs of all linears, pass at `activation_bytes_per_second`, 0: in no time;
    `chunk_layer_seconds`: what any prompt adds to a layer of a step, whatever its tokens.
    `step_variation`: half of what two steps alike differ by in the mean, over their seconds (their Gini coefficient): so much longer the later
    of two takes, for which the other's stage waits. `gateway_token_seconds`: what a token takes the gateway of this machine, requests of usual size.
    `node_bandwidth_bytes_per_second`: what all cores of a node read together from the memory that they share; 0: each device has a memory of its own.
    `node_devices`: those that share it, which is counted when a cluster is read, whatever a file says.
    `source`: "published: <where>" or "measured".
    A format that is absent from the efficiencies cannot run on this device. `packed_rows`: up to so many tokens a processor multiplies weights
    of the format as they are stored, by kernels that keep no memory; a format that is absent: by the runtime's own limits. `pads_rows`: whether a
    processor's steps have as few numbers of rows as `contract.rows` says, for kernels that are kept for each. `unpacked_per_second`:
    weights that more tokens have to unpack first; a format that is absent: as part of its prefill efficiency. `few_rows_efficiency`: the share
    of the longer bound's rate that products of `contract.rows.TIMED_ROWS` rows reach, being bound by both, or by kernels of their own; absent: all of it.
    """

    type: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops_per_second: float  # dense products in the 16-bit compute type
    float32_flops_per_second: float
    decode_efficiency: dict[FormatName, float]
    prefill_efficiency: dict[FormatName, float]
    layer_overhead_seconds: float
    source: str
    compute_capability: str = ""
    step_overhead_seconds: float = 0.0
    sequence_layer_seconds: float = 0.0
    sequence_step_seconds: float = 0.0
    sampled_row_seconds: float = 0.0
    attention_bytes_per_second: float = 0.0
    attention_flops_per_second: float = 0.0
    activation_bytes_per_second: float = 0.0
    chunk_layer_seconds: float = 0.0
    step_variation: float = 0.0
    gateway_token_seconds: float = 0.0
    node_bandwidth_bytes_per_second: float = 0.0
    node_devices: int = 1
    threads: int = 0  # CPU devices: threads the numbers were measured with
    packed_rows: dict[FormatName, int] = msgspec.field(default_factory=dict)
    pads_rows: bool = True
    unpacked_per_second: dict[FormatName, float] = msgspec.field(default_factory=dict)
    few_rows_efficiency: dict[FormatName, tuple[float, ...]] = msgspec.field(default_factory=dict)

    def pads(self, compute_type: ComputeType) -> bool:
        """Whether a processor pads the rows of steps in this type: what `pads_rows` says is of bfloat16."""
        return self.pads_rows or compute_type != "bfloat16"

    def slowed(self, share: float) -> "DeviceProfile":
        """The device when it has this share of its time. What its node's memory gives all devices together is as it was."""
        changed: dict[str, Any] = {name: getattr(self, name) * share for name in _RATES}
        changed |= {name: getattr(self, name) / share for name in _SECONDS}
        unpacked = {name: rate * share for name, rate in self.unpacked_per_second.items()}
        return msgspec.structs.replace(self, **changed, unpacked_per_second=unpacked)


_RATES = (
    "bandwidth_bytes_per_second",
    "flops_per_second",
    "float32_flops_per_second",
    "attention_bytes_per_second",
    "attention_flops_per_second",
    "activation_bytes_per_second",
)
_SECONDS = (
    "layer_overhead_seconds",
    "step_overhead_seconds",
    "sequence_layer_seconds",
    "sequence_step_seconds",
    "sampled_row_seconds",
    "chunk_layer_seconds",
)
