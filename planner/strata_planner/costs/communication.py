"""Seconds on links, latency + bytes / bandwidth each (alpha-beta): hidden states between stages, collectives inside one.

Called by the search once per link of a device order and once per group of devices.

What overlaps, as the runtime does it. A stage hands its frame to libzmq, whose own threads send it while the stage computes
its next micro-batch: the hop between two stages is a server beside them. In steady state a micro-batch passes every
max(slowest stage, slowest hop), where a hop is taken only for bytes / bandwidth (`hidden_states_busy_seconds`): frames follow
each other on a connection, so latency delays each but holds none up. What a micro-batch itself needs from end to end is the
sum, latency included (`hidden_states_seconds`), and so is each round of decoding that waits for its own last token. The
collectives inside a stage overlap with nothing: each layer needs the sum of all devices.

HexGen (ICML 2024) takes the quickest pair of devices of two groups for a hop. Here a group lies on one node and links join
nodes: all pairs are equal, and the first device of each group leads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_planner.costs.source import Timed
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import Model

_TOKEN_BYTES = 64  # a sampled token with its logprob, on its way back to the first stage
_ALL_REDUCES = 2  # of a layer: after the attention's output, after the MLP's second half (Megatron)
ALPHA_BETA = "alpha-beta"
SHARED_MEMORY = "shared memory"
# The share of a link's rate, one direction, that the steps of an all-reduce get. NCCL's measured all-reduces from 8 KB to 64 MB
# (operator tables, least squares of 2, 4 and 8 devices): A100 0.27, H100 0.32, H200 0.33, B200 0.26 over NVLink; over PCIe
# 0.22 on RTX PRO 6000, and 0.29, 0.08 and 0.03 on 2, 4 and 8 L40S.
RING_SHARE = 0.3
# Processors of a node add up over shared memory, whatever links join them: each rank passes over what every rank has written. Measured with two
# ranks (`python -m benchmarks.ranks`): 4 KB in 5 us, 256 KB in 52.
_SHARED_MEMORY_SECONDS = 5e-6
_SHARED_MEMORY_BYTES_PER_SECOND = 11e9


def hidden_states_bytes(model: Model, tokens: int, compute_type: ComputeType) -> int:
    return tokens * model.hidden_size * COMPUTE_TYPE_BYTES[compute_type]


def hidden_states_seconds(model: Model, link: LinkRate, tokens: int, compute_type: ComputeType) -> float:
    """From one leader to the next."""
    return link.latency_seconds + hidden_states_busy_seconds(model, link, tokens, compute_type)


def hidden_states_busy_seconds(model: Model, link: LinkRate, tokens: int, compute_type: ComputeType) -> float:
    """How long a micro-batch's frame keeps the next one's off the link."""
    return hidden_states_bytes(model, tokens, compute_type) / link.bytes_per_second


def sampled_tokens_seconds(link: LinkRate, sequences: int) -> float:
    return link.latency_seconds + sequences * _TOKEN_BYTES / link.bytes_per_second


@runtime_checkable
class CollectiveSource(Protocol):
    """Where measured collectives come from: a latency source that knows them too."""

    def all_reduce(self, device: str, degree: int, size_bytes: int) -> Timed | None:
        """Of 16-bit values over `degree` devices of one node; `device`: their catalogue name. None: not known."""


@dataclass(frozen=True)
class Exchange:
    """What a group of devices sums for one micro-batch. `link`: the slowest between any two of them."""

    device: str
    degree: int
    link: LinkRate
    size_bytes: int


def layer_collectives(sources: Iterable[object], exchange: Exchange) -> Timed:
    """The all-reduces of one layer: by the first of `sources` that measured them, else over processors' memory or by alpha and beta of the link.

    Measured ones hold for the interconnect that the catalogue gives the device, not for links that the user described.
    """
    for source in sources:
        if isinstance(source, CollectiveSource):
            one = source.all_reduce(exchange.device, exchange.degree, exchange.size_bytes)
            if one is not None:
                return Timed(_ALL_REDUCES * one.seconds, one.source)
    if exchange.device == CPU:
        return Timed(layer_sums_seconds(exchange.degree, exchange.size_bytes), SHARED_MEMORY)
    return Timed(_ALL_REDUCES * ring_seconds(exchange), ALPHA_BETA)


def layer_sums_seconds(degree: int, size_bytes: int) -> float:
    """The all-reduces of one layer over processors of one node."""
    return _ALL_REDUCES * shared_memory_seconds(degree, size_bytes)


def shared_memory_seconds(degree: int, size_bytes: int) -> float:
    """One all-reduce of processors of one node."""
    passed = degree * size_bytes
    return (degree > 1) * (_SHARED_MEMORY_SECONDS + passed / _SHARED_MEMORY_BYTES_PER_SECOND)


def hand_over_seconds(device: str, degree: int, link: LinkRate, size_bytes: int) -> float:
    """From a stage's first rank to the others, once a step: processors get its frame over a socket, each the `size_bytes` of hidden states that came
    over the link from the stage before once, for all (HexGen, section 3.3). Ranks of the first stage get token ids, which take no longer.
    """
    if device != CPU or degree == 1:
        return 0.0
    return link.latency_seconds + handed_over_bytes(degree, size_bytes) / link.bytes_per_second


def handed_over_bytes(degree: int, size_bytes: int) -> int:
    """Inside a stage, of a frame with so many bytes of hidden states."""
    return (degree - 1) * size_bytes


def ring_seconds(exchange: Exchange) -> float:
    """One all-reduce as a ring: 2 (degree - 1) steps of 1 / degree of the bytes. HexGen (section 3.2) counts the same steps,
    at the whole of the link's rate.
    """
    rate = RING_SHARE * exchange.link.bytes_per_second
    step = exchange.link.latency_seconds + exchange.size_bytes / exchange.degree / rate
    return 2 * (exchange.degree - 1) * step


def layer_collectives_seconds(
    model: Model, link: LinkRate, degree: int, tokens: int, compute_type: ComputeType
) -> float:
    """The all-reduces of one layer over `degree` devices, by alpha and beta. `link`: the slowest between any two of them."""
    size = hidden_states_bytes(model, tokens, compute_type)
    return layer_collectives((), Exchange("", degree, link, size)).seconds
