"""What DynPart published, and the machines that it was measured on as far as others tell. Read by `partition`.

EECS-2024-108 (UC Berkeley), tables 4.1 and A.1 to A.3, typed from the report. Models are those of `examples/models`. Nothing of
the machines is taken from those tables:

    device rates      catalogue.yaml: datasheets without sparsity (L4 121, A100 312 TFLOP/s; the paper prints them with: 242, 624),
                      with the efficiencies whose origin the catalogue names
    links, 4 x L4     4.2 GB/s per device and direction. Helix (ASPLOS'25) timed a Llama-2-70B layer on one L4 and on two, on Google
                      Cloud as the paper: what two take beyond half of one is two all-reduces; the median over its 30 batches,
                      which range from 3.3 to 6.6 (`helix_bandwidth`). NVIDIA's NCCL tables say 5.2 for four L40S (PCIe 4.0 without NVLink too). The paper's
                      64 GB/s is PCIe's peak, both directions added.
    links, 4 x A100   all-reduce 216.7 GB/s of bus bandwidth, all-gather 191.6, reduce-scatter 203.1, all-to-all 194.9: NCCL 2.27.3
                      on A100-SXM4-80GB, 4 GPUs, half, 268,435,456 elements, in aiconfigurator-core 0.12.0; L40S from there too. The
                      paper's 600 GB/s is NVLink's peak, both directions added.
    latency           10 us a ring step, the planner's own for devices of one node
    the rest          float16 (the paper's half precision); gathers of weights are waited for, nothing is overlapped
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from strata_planner.contract.strategies import StrategyName
from strata_planner.costs.source import Rates
from strata_planner.partition.chain import linears_of
from strata_planner.partition.polynomial import Polynomial, symbol
from strata_planner.partition.seconds import Group
from strata_planner.partition.states import Collective
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import LinkRate
from strata_planner.question.model import Model

MODELS = Path(__file__).parent.parent / "examples" / "models"
LATENCY_MS = 0.01
L4_GIGABYTES_PER_SECOND = 4.2
NCCL_A100 = {
    Collective.ALL_REDUCE: 216.7,
    Collective.ALL_GATHER: 191.6,
    Collective.REDUCE_SCATTER: 203.1,
    Collective.ALL_TO_ALL: 194.9,
}
NCCL_L40S = {
    Collective.ALL_REDUCE: 5.2,
    Collective.ALL_GATHER: 4.7,
    Collective.REDUCE_SCATTER: 5.0,
    Collective.ALL_TO_ALL: 4.5,
}

N, D = symbol("n"), symbol("d")
AS_OPT: dict[str, Polynomial] = {"q": D, "k": D, "m": 4 * D}
# Table 4.1: weight FLOPs, communication volume, weight memory.
TABLE_4_1: dict[StrategyName, tuple[Polynomial, Polynomial, Polynomial]] = {
    "megatron": ((24 * N * D * D).over_g(), 8 * N * D, (18 * D * D).over_g()),
    "projection-replicated": (
        2 * N * D * D + (22 * N * D * D).over_g(),
        6 * N * D,
        2 * D * D + (16 * D * D).over_g(),
    ),
    "weight-gathered": ((24 * N * D * D).over_g(), 4 * N * D + 16 * D * D, (18 * D * D).over_g()),
}
QKV_BYTES = (6 * D * D).over_g()


@dataclass(frozen=True)
class Published:
    """One table of the paper's appendix A.1: tokens -> mean TTFT in ms of the three strategies, in `STRATEGIES`' order."""

    table: str
    model: str
    device: str
    milliseconds: dict[int, tuple[float, float, float]]

    @property
    def shapes(self) -> Model:
        return Model.from_folder(MODELS / self.model, for_serving=False)


TABLES = (
    Published(
        "A.1",
        "llama-2-7b",
        "L4",
        {
            1: (39.4615, 41.868, 1491.6495),
            1024: (236.253, 210.2415, 1612.1665),
            4096: (949.788, 838.32, 2031.913),
            8096: (1912.5425, 1681.312, 2669.958),
            16192: (3910.1625, 3457.254, 3993.292),
            32384: (8381.168, 7485.6335, 7080.7215),
            64768: (19795.499, 18170.0725, 15503.617),
        },
    ),
    Published(
        "A.2",
        "llama-2-13b",
        "L4",
        {
            1: (49.96, 51.6165, 2915.8775),
            1024: (371.455, 335.1855, 3094.4945),
            4096: (1540.623, 1388.0525, 3827.5665),
            8096: (3129.5115, 2799.9325, 4851.285),
            16192: (6356.4685, 5731.1065, 7064.468),
            32384: (13975.2355, 12890.9215, 12380.7165),
        },
    ),
    Published(
        "A.3",
        "llama-2-70b",
        "A100-80GB",
        {
            1: (104.6745, 107.9335, 623.489),
            1024: (228.499, 258.539, 714.442),
            4096: (790.8735, 905.532, 1110.536),
            8096: (1567.402, 1798.3365, 1948.2325),
            16192: (3289.319, 3764.8925, 3743.2965),
            32384: (7286.418, 8202.5445, 7824.277),
            64768: (17882.6555, 19821.264, 18844.9195),
        },
    ),
)


def group_of(device: str) -> Group:
    """Four devices as the paper had them."""
    rates = Rates(catalogue().profile(device), "float16", 16, device)
    if device == "L4":
        return Group(rates, LinkRate(gbps=8 * L4_GIGABYTES_PER_SECOND, latency_ms=LATENCY_MS), 4)
    return with_collectives(Group(rates, LinkRate(latency_ms=LATENCY_MS), 4), NCCL_A100)


def gathers_gigabytes_per_second(table: Published) -> float:
    """Bus bandwidth of gathers, from what one token takes longer with WeightGathered than with Megatron: the MLPs' weights, float16."""
    megatron, _, gathered = table.milliseconds[1]
    layers = table.shapes.layers
    weights = linears_of(layers[0])
    elements = sum(each.out_features * each.in_features for name in ("w1", "w2") for each in weights[name])
    moved_bytes = 2 * elements * len(layers) * 3 / 4  # of four shares each device has one
    return moved_bytes / (gathered - megatron) / 1e6


def with_collectives(group: Group, bus: dict[Collective, float]) -> Group:
    """Bus bandwidths of each collective in place of one."""
    whole = bus[Collective.ALL_REDUCE]
    link = LinkRate(gbps=8 * whole, latency_ms=group.link.latency_ms)
    return replace(group, link=link, link_shares={name: value / whole for name, value in bus.items()})


def with_bandwidth(group: Group, gigabytes_per_second: float) -> Group:
    link = LinkRate(gbps=8 * gigabytes_per_second, latency_ms=group.link.latency_ms)
    return replace(group, link=link, link_shares={})


def variants() -> Iterator[tuple[str, Group]]:
    """The four L4 under other assumptions, from elsewhere too."""
    group = group_of("L4")
    yield "4.2 GB/s (Helix, 2 x L4): used", group
    yield "5.2, 4.7, 5.0 GB/s (NCCL on 4 x L40S)", with_collectives(group, NCCL_L40S)
    yield "32 GB/s (PCIe 4.0 x16, one direction)", with_bandwidth(group, 32)
    profile = msgspec.structs.replace(group.rates.profile, flops_per_second=242e12)
    peak = replace(group, rates=replace(group.rates, profile=profile))
    yield "64 GB/s, 242 TFLOP/s (as the paper prints)", with_bandwidth(peak, 64)
    yield "4.2 GB/s, half of compute hides gathers", replace(group, overlap=0.5)
    yield "4.2 GB/s, all of compute hides gathers", replace(group, overlap=1.0)


def helix_bandwidth(data: Path) -> float | None:
    """GB/s of an all-reduce between two L4, from Helix's layer times; None where its files are not there."""
    folder = data / "helix" / "llama2_70b"
    files = [folder / name / "prompt_bs2time.csv" for name in ("l4", "l4x2")]
    if not all(file.is_file() for file in files):
        return None
    one, two = (_helix(file) for file in files)
    # Two all-reduces of [tokens, 8192] halves; over two devices a ring sends as many bytes as the tensor has.
    rates = [
        2 * tokens * 8192 * 2 / (two[tokens] - one[tokens] / 2) / 1e6 for tokens in one if tokens and tokens in two
    ]
    return median(rates)


def _helix(file: Path) -> dict[int, float]:
    """Tokens -> milliseconds. The last line is the table's end mark."""
    with file.open(encoding="utf-8", newline="") as lines:
        found = {int(row[0]): float(row[1]) for row in csv.reader(lines)}
    return {tokens: value for tokens, value in found.items() if value > 0}
