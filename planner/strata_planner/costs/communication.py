"""Seconds on links, latency + bytes / bandwidth each (alpha-beta): hidden states between stages, collectives inside one.

Called by the search once per link of a device order and once per group of devices.
"""

from strata_planner.cluster import LinkRate
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_planner.model import Model

_TOKEN_BYTES = 64  # a sampled token with its logprob, on its way back to the first stage
_ALL_REDUCES = 2  # of a layer: after the attention's output, after the MLP's second half (Megatron)


def hidden_states_seconds(model: Model, link: LinkRate, tokens: int, compute_type: ComputeType) -> float:
    """From one leader to the next."""
    size = tokens * model.hidden_size * COMPUTE_TYPE_BYTES[compute_type]
    return link.latency_seconds + size / link.bytes_per_second


def sampled_tokens_seconds(link: LinkRate, sequences: int) -> float:
    return link.latency_seconds + sequences * _TOKEN_BYTES / link.bytes_per_second


def layer_collectives_seconds(
    model: Model, link: LinkRate, degree: int, tokens: int, compute_type: ComputeType
) -> float:
    """The all-reduces of one layer over `degree` devices: a ring's 2 (degree - 1) steps of 1 / degree of the hidden states.

    HexGen (ICML 2024, section 3.2) counts the same steps. `link`: the slowest between any two of the devices.
    """
    size = tokens * model.hidden_size * COMPUTE_TYPE_BYTES[compute_type]
    step = link.latency_seconds + size / degree / link.bytes_per_second
    return _ALL_REDUCES * 2 * (degree - 1) * step
