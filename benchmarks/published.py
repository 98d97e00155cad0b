"""What published figures rest on: kernels of 2023 beside today's, the catalogue's efficiencies, the tables' own accuracy.

`python -m benchmarks.published [--data DIR] [--json FILE]`, half a minute. Needs the extra `profiles`; the comparison with LLM-PQ's
kernels also the data (`shared_data`).

    kernels        one OPT-30b layer below 16 bits over the same layer at 16, prefilling 8 prompts of 512 tokens and decoding 8
                   sequences past 512: as printed in the LLM-PQ authors' notebooks, as operator tables measured, as the roofline says
    cluster 9      LLM-PQ's batch (32 sequences, 512 in, 100 out) over four T4 at one precision, 12 layers each, by its own objective
    efficiencies   shares of bandwidth and rate that the operator tables reach, beside the catalogue's
    layer tables   the roofline at 16 bits against the per-layer tables of LLM-PQ's notebooks and of the Helix artifact
    leave one out  each size within the tables, predicted from its neighbours
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.reference.published_tables import helix_table, llmpq_tables
from benchmarks.rows import Row, run
from benchmarks.shared_data import VARIABLE, data_folder
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName, stored_bytes
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.latency import Latencies
from strata_planner.costs.operators import SYSTEMS, OperatorTables
from strata_planner.costs.roofline import Roofline
from strata_planner.costs.source import LatencySource, Phase, Rates
from strata_planner.costs.tables import LayerTables, TableShape
from strata_planner.question.catalogue import catalogue
from strata_planner.question.model import LayerShape, Model

PREFILL, DECODE = Phase(8, 512, 256), Phase(8, 1, 512)
PHASES = {"prefill": PREFILL, "decode": DECODE}
FORMATS: tuple[FormatName, ...] = ("dense", "int8", "w8a8", "fp8_a8", "int4", "int3")
NAMES_2023 = {"T4": ["T4"], "V100": ["V100-32GB"], "P100": ["P100-12GB"]}
HELIX = {"a100": "A100-40GB", "v100": "V100-16GB", "l4": "L4", "t4": "T4"}
HELIX_PAST = 300  # not said there; at up to 32 sequences it moves a time by 2 % at most
DEVICES = ("A100-80GB", "H100", "L40S", "B200")
ROWS_DECODE, ROWS_PREFILL = 8, 2048
L40S_CACHE_BYTES = 96e6
LEAST_SIZE = 1024  # smaller linears are launches more than sizes


def llama(hidden: int, width: int, heads: int, kv_heads: int) -> Model:
    return Model.from_config({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 32000, "max_position_embeddings": 4096,
    })  # fmt: skip


def opt(hidden: int) -> Model:
    return Model.from_config({
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": 48,
        "num_attention_heads": hidden // 128, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
    })  # fmt: skip


OPT_30B = opt(7168).layers[0]
MODELS = {
    "Llama-2 7B": llama(4096, 11008, 32, 32),
    "Llama-3 8B": llama(4096, 14336, 32, 8),
    "Llama-2 13B": llama(5120, 13824, 40, 40),
    "Llama-2 70B": llama(8192, 28672, 64, 8),
    "OPT 30b": opt(7168),
    "OPT 66b": opt(9216),
}


@dataclass(frozen=True)
class Factor:
    """A layer's time at a format over the same layer's at 16 bits."""

    device: str
    source: str
    format_name: FormatName
    phase: str
    factor: float


def factors(source: LatencySource, name: str, devices: Sequence[str]) -> list[Factor]:
    """Of the OPT-30b layer, wherever the source knows both."""
    found = []
    for device in devices:
        rates = Rates(catalogue().profile(device), "float16", 16, device)
        for format_name in FORMATS[1:]:
            if isinstance(source, Roofline) and format_name not in rates.profile.decode_efficiency:
                continue
            for phase_name, phase in PHASES.items():
                low = source.layer(OPT_30B, format_name, rates, phase)
                dense = source.layer(OPT_30B, "dense", rates, phase)
                if low and dense and "scaled" not in low.source:
                    found.append(Factor(device, name, format_name, phase_name, low.seconds / dense.seconds))
    return found


def factor_table(found: list[Factor]) -> Table:
    table = Table(title="One OPT-30b layer: time over the same layer at 16 bits", title_justify="left")
    for column in ("device", "source", "format", *PHASES):
        table.add_column(column, justify="right" if column in PHASES else "left")
    lines: dict[tuple[str, str, FormatName], dict[str, float]] = {}
    for each in found:
        lines.setdefault((each.device, each.source, each.format_name), {})[each.phase] = each.factor
    for (device, source, format_name), values in lines.items():
        table.add_row(
            device, source, format_name, *(f"{values[phase]:.2f}" if phase in values else "" for phase in PHASES)
        )
    return table


def cluster_9(source: LatencySource, format_name: FormatName) -> float:
    """Tokens per second of 12 layers on each of four T4, micro-batches of 8, by LLM-PQ's objective; hops left out."""
    rates = Rates(catalogue().profile("T4"), "float16", 16, "T4")
    latencies = Latencies((source,))
    prefill, decode = (12 * latencies.layer(OPT_30B, format_name, rates, phase).seconds for phase in PHASES.values())
    batch, tokens, stages, micro_batches = 32, 100, 4, 4
    rounds = micro_batches - 1 + stages
    return batch * tokens / (rounds * prefill + (tokens - 1) * rounds * decode)


def cluster_9_table(of_2023: LayerTables) -> Table:
    table = Table(
        title="LLM-PQ's cluster 9, four T4, OPT-30b, tokens/s (published: Uniform 3.06, LLM-PQ 7.85)",
        title_justify="left",
    )
    for column in ("bits", "kernels of 2023", "today's (roofline)"):
        table.add_column(column, justify="right")
    for format_name in ("int8", "int4", "int3"):
        values = (cluster_9(source, format_name) for source in (of_2023, Roofline()))
        table.add_row(str(BITS_OF_FORMAT[format_name]), *(f"{value:.2f}" for value in values))
    return table


def linears_share(
    tables: OperatorTables, device: str, format_name: FormatName, layer: LayerShape, rows: int
) -> float | None:
    """Of the bandwidth over stored bytes (decoding) or of the 16-bit rate (prefilling) that a layer's linears reach."""
    times = [tables.linear(device, format_name, each.out_features, each.in_features, rows) for each in layer.linears]
    known = [time.seconds for time in times if time is not None]
    if len(known) < len(times):
        return None
    profile = catalogue().profile(device)
    if rows == ROWS_PREFILL:
        return 2 * rows * layer.linear_parameters / profile.flops_per_second / sum(known)
    stored = sum(stored_bytes(format_name, each.out_features, each.in_features, "bfloat16") for each in layer.linears)
    return stored / profile.bandwidth_bytes_per_second / sum(known)


@dataclass(frozen=True)
class Efficiency:
    device: str
    format_name: FormatName
    decode: float
    prefill: float
    stated: tuple[float, float] | None  # the catalogue's decode and prefill


def efficiencies(tables: OperatorTables) -> list[Efficiency]:
    """Medians over the models; while decoding on L40S only over layers whose linears are twice its cache on average: the tables
    were measured with one weight again and again.
    """
    found = []
    for device in DEVICES:
        profile = catalogue().profile(device)
        for format_name in FORMATS:
            layers = [model.layers[0] for model in MODELS.values()]
            large = [each for each in layers if device != "L40S" or _mean_bytes(each) > 2 * L40S_CACHE_BYTES]
            decode = [linears_share(tables, device, format_name, each, ROWS_DECODE) for each in large]
            prefill = [linears_share(tables, device, format_name, each, ROWS_PREFILL) for each in layers]
            if all(decode) and all(prefill):
                known = format_name in profile.decode_efficiency
                stated = (
                    (profile.decode_efficiency[format_name], profile.prefill_efficiency[format_name]) if known else None
                )
                shares = (median(each or 0.0 for each in decode), median(each or 0.0 for each in prefill))
                found.append(Efficiency(device, format_name, *shares, stated))
    return found


def _mean_bytes(layer: LayerShape) -> float:
    """Of a linear at 16 bits."""
    return 2 * layer.linear_parameters / len(layer.linears)


def efficiency_table(found: list[Efficiency]) -> Table:
    table = Table(title="Shares of the peak: operator tables (catalogue)", title_justify="left")
    for column in ("device", "format", "decode, of bandwidth", "prefill, of the 16-bit rate"):
        table.add_column(column, justify="left" if column in {"device", "format"} else "right")
    for each in found:
        stated = [f" ({share:.2f})" for share in each.stated] if each.stated else ["", ""]
        table.add_row(each.device, each.format_name, f"{each.decode:.2f}{stated[0]}", f"{each.prefill:.2f}{stated[1]}")
    return table


def leave_one_out(axis: Axis) -> Iterator[float]:
    """Relative errors of a GEMM table where an inner number of outputs is left out and read from its neighbours."""
    inner = range(1, len(axis.points) - 1)
    without = {axis.points[place]: axis.without(place) for place in inner}
    for (outputs, inputs, rows), milliseconds in axis.leaves():
        if outputs in without and min(outputs, inputs) >= LEAST_SIZE:
            yield abs(without[outputs].at(outputs, inputs, rows) / milliseconds - 1)


@dataclass(frozen=True)
class Against:
    """The roofline over a published layer at 16 bits, micro-batch by micro-batch."""

    device: str
    source: str
    phase: str
    ratios: tuple[float, ...]

    @property
    def error(self) -> float:
        return fmean(abs(ratio - 1) for ratio in self.ratios)


def against_tables(data: Path, of_2023: LayerTables) -> Iterator[Against]:
    """Only at lengths and batches that were measured."""
    opt_phases = {"prefill": [Phase(n, 512, 256) for n in (2, 4, 8)], "decode": [Phase(n, 1, 512) for n in (2, 4, 8)]}
    for device in ("T4", "V100-32GB", "P100-12GB"):
        for name, phases in opt_phases.items():
            yield _against(
                of_2023,
                device,
                OPT_30B,
                name,
                [each for each in phases if device != "P100-12GB" or each.sequences == 8],
            )
    layer = MODELS["Llama-2 70B"].layers[0]
    llama_phases = {
        "prefill": [Phase(n, 250, 125) for n in (1, 2, 4, 8, 16)],
        "decode": [Phase(n, 1, HELIX_PAST) for n in (4, 8, 16, 32)],
    }
    for folder, device in HELIX.items():
        table = helix_table(data / "helix" / "llama2_70b" / folder, TableShape.of(layer), [device])
        for name, phases in llama_phases.items():
            yield _against(LayerTables((table,)), device, layer, name, phases)


def _against(tables: LayerTables, device: str, layer: LayerShape, name: str, phases: Sequence[Phase]) -> Against:
    rates = Rates(catalogue().profile(device), "float16", 16, device)
    published = [tables.layer(layer, "dense", rates, phase) for phase in phases]
    ratios = [
        Roofline().layer(layer, "dense", rates, phase).seconds / answer.seconds
        for phase, answer in zip(phases, published, strict=True)
        if answer is not None
    ]
    source = next(answer.source for answer in published if answer is not None)
    return Against(device, source.removeprefix("layer table, "), name, tuple(ratios))


def against_table(found: Sequence[Against]) -> Table:
    table = Table(title="The roofline at 16 bits over published layer tables", title_justify="left")
    for column in ("device", "source", "phase", "least", "most", "mean error"):
        table.add_column(column, justify="left" if column in {"device", "source", "phase"} else "right")
    for each in found:
        row = (f"{min(each.ratios):.2f}", f"{max(each.ratios):.2f}", f"{each.error:.0%}")
        table.add_row(each.device, each.source, each.phase, *row)
    return table


def interpolation_table(tables: OperatorTables) -> tuple[Table, float]:
    """Per device and format; and the median over all."""
    table = Table(title="GEMM tables, each size left out once: relative error", title_justify="left")
    for column in ("device", "format", "median", "95 %", "points"):
        table.add_column(column, justify="left" if column in {"device", "format"} else "right")
    medians = []
    for device in DEVICES:
        for format_name in FORMATS:
            axis = tables.gemm_axes(device, format_name)
            if axis is not None:
                errors = sorted(leave_one_out(axis))
                medians.append(median(errors))
                worst = errors[int(0.95 * len(errors))]
                table.add_row(device, format_name, f"{medians[-1]:.1%}", f"{worst:.1%}", f"{len(errors):,}")
    return table, median(medians)


def measure(data: Path | None) -> list[Row]:
    tables = OperatorTables.installed()
    if tables is None:
        raise SystemExit("the operator tables are missing: pip install 'strata-llm[profiles]'")
    console, shape = Console(width=150), TableShape.of(OPT_30B)
    of_2023 = (
        LayerTables(llmpq_tables(data / "llmpq-layer-latency.csv", shape, NAMES_2023)) if data else LayerTables(())
    )
    old = factors(
        of_2023, "kernels of 2023 (published)", tuple(name for names in NAMES_2023.values() for name in names)
    )
    today = factors(tables, "operator tables (measured)", tuple(name for name in SYSTEMS if name != "A800-80GB"))
    assumed = factors(Roofline(), "roofline (catalogue)", ("T4", "V100-32GB", "P100-12GB", *DEVICES))
    console.print(factor_table([*old, *today, *assumed]))
    roofline: list[Row] = []
    if data:
        console.print(cluster_9_table(of_2023))
        found = list(against_tables(data, of_2023))
        console.print(against_table(found))
        # Fitted to that very table.
        error = fmean(each.error for each in found if each.device not in NAMES_2023["P100"])
        roofline.append(
            Row("roofline_error", error, "mean relative, 16 bits, without P100", "layer tables (published)")
        )
    else:
        console.print(f"left out without --data DIR or {VARIABLE}: kernels of 2023, cluster 9, roofline_error")
    shares = efficiencies(tables)
    console.print(efficiency_table(shares))
    shown, interpolation = interpolation_table(tables)
    console.print(shown)
    off = [
        abs(stated / measured - 1)
        for each in shares
        if each.stated
        for stated, measured in zip(each.stated, (each.decode, each.prefill), strict=True)
    ]
    rows = [
        Row(f"prefill_{each.device}_{each.format_name}", each.factor, "x the time at 16 bits", each.source)
        for each in [*old, *today]
        if each.phase == "prefill" and each.format_name in {"int4", "int8"}
    ]
    return [
        *rows,
        *roofline,
        Row("catalogue_efficiency_off", max(off), "worst relative, of those with tables", "operator tables (measured)"),
        Row("interpolation_error", interpolation, "median relative, twice the tables' spacing"),
    ]


def main() -> None:
    data, rest = data_folder()
    run("published", lambda: measure(data), rest)


if __name__ == "__main__":
    main()
