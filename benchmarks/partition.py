"""DynPart's tables beside ours: symbolic costs, TTFT, switches. `python -m benchmarks.partition [--json FILE] [--data DIR]`.

A dozen seconds. Nothing is fitted to the published tables (`dynpart`, which also says where every assumption is from). TTFT here
is the decoder layers of one sequence and one row of logits; the paper names no batch. `--data` (or STRATA_SHARED_DATA): a folder
with Helix's layer times, from which the bandwidth between L4s is computed again.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.dynpart import (
    AS_OPT,
    QKV_BYTES,
    TABLE_4_1,
    TABLES,
    Published,
    gathers_gigabytes_per_second,
    group_of,
    helix_bandwidth,
    variants,
    with_bandwidth,
)
from benchmarks.rows import Row, run
from strata_planner.contract.strategies import STRATEGIES, StrategyName
from strata_planner.costs.roofline import Roofline
from strata_planner.partition.chain import decoder_chain, sizes_of
from strata_planner.partition.naming import Found, find_strategies, recognised
from strata_planner.partition.polynomial import Polynomial
from strata_planner.partition.search import count_sequences, pareto_front
from strata_planner.partition.seconds import Group, layer_seconds
from strata_planner.partition.states import Collective, R, Volume
from strata_planner.partition.strategy import Strategy
from strata_planner.partition.switching import model_seconds, strategy_table

BANDWIDTHS = tuple(0.1 * 1.02**step for step in range(400))  # up to 270 GB/s
SHORTEST = 1024  # below, a prefill of the paper's library in Python is launching, not computing


@dataclass(frozen=True)
class Bracket:
    """Lengths of a published table, and which strategies may be the fastest there."""

    table: Published
    text: str
    allowed: Mapping[int, tuple[StrategyName, ...]]

    def missed(self, group: Group) -> dict[int, float]:
        """Length -> how much the best allowed strategy takes over the one computed as fastest, minus 1."""
        found = {}
        for tokens, names in self.allowed.items():
            computed = dict(zip(STRATEGIES, ttft_milliseconds(self.table, group, tokens), strict=True))
            margin = min(computed[name] for name in names) / min(computed.values()) - 1
            if margin > 0:
                found[tokens] = margin
        return found


def brackets() -> Iterator[Bracket]:
    """What the three tables say of where strategies change."""
    megatron, replicated, gathered = STRATEGIES
    for table in TABLES[:2]:
        yield Bracket(table, "leaves Megatron within (1, 1024]", {1: (megatron,), 1024: (replicated, gathered)})
        yield Bracket(
            table,
            "reaches WeightGathered within (16192, 32384]",
            {16192: (megatron, replicated), 32384: (gathered,)},
        )
    always = dict.fromkeys(TABLES[2].milliseconds, (megatron,))
    yield Bracket(TABLES[2], "Megatron at all seven lengths", always)


def ttft_milliseconds(table: Published, group: Group, tokens: int) -> tuple[float, ...]:
    model = table.shapes
    seconds = model_seconds(model, group)
    head = Roofline().head(model, group.rates, 1).seconds
    return tuple(1e3 * (seconds(name, tokens) + head) for name in STRATEGIES)


def best(milliseconds: Sequence[float]) -> StrategyName:
    return STRATEGIES[min(range(len(STRATEGIES)), key=milliseconds.__getitem__)]


# Symbolic costs ----------------------------------------------------------------------------------------------------------


def symbolic(console: Console) -> float:
    """Prints table 4.1 beside what the search says; the share of its nine cells that are equal, QKV added to its memory."""
    shown = Table(
        title="Symbolic costs of one layer (OPT: m = 4 d, k = q = d), ours and DynPart's table 4.1",
        title_justify="left",
    )
    for column in ("strategy", "cost", "found by the search", "published", "difference"):
        shown.add_column(column)
    equal = []
    for name, strategy in find_strategies(gated=False).strategies.items():
        costs = strategy.costs(Volume.PAPER)
        ours = (costs.weight_flops, costs.communication_bytes, costs.weight_bytes)
        for label, mine, theirs in zip(("FLOPs", "bytes moved", "bytes held"), ours, TABLE_4_1[name], strict=True):
            here = mine.at(**AS_OPT)
            expected = theirs + QKV_BYTES if label == "bytes held" else theirs
            equal.append(here == expected)
            note = "QKV weights, 6 d²/g, left out there" if here - theirs == QKV_BYTES else str(here - theirs)
            shown.add_row(name, label, str(here), str(theirs), note)
    console.print(shown)
    found = find_strategies(gated=True)
    console.print("Llama (gated, grouped queries):")
    for name, strategy in found.strategies.items():
        costs = strategy.costs(Volume.PAPER)
        console.print(
            f"  {name}: FLOPs {costs.weight_flops}; moved {costs.communication_bytes}; held {costs.weight_bytes}"
        )
        console.print(f"    {' · '.join(map(str, strategy.steps))}", style="dim")
    layout = ", ".join(f"{name} {state}" for name, state in found.layout.items())
    console.print(f"One layout for all three: {layout}; {found.layout_bytes} bytes a device and layer\n")
    return fmean(equal)


# TTFT --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One length of one published table."""

    table: Published
    tokens: int
    published: tuple[float, ...]
    computed: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(abs(ours / theirs - 1) for ours, theirs in zip(self.computed, self.published, strict=True))

    @property
    def agrees(self) -> bool:
        return best(self.computed) == best(self.published)

    @property
    def regret(self) -> float:
        """Published TTFT of the strategy that we would run, over the best published one, minus 1."""
        return self.published[STRATEGIES.index(best(self.computed))] / min(self.published) - 1


def compare() -> list[Compared]:
    return [
        Compared(table, tokens, published, ttft_milliseconds(table, group_of(table.device), tokens))
        for table in TABLES
        for tokens, published in table.milliseconds.items()
    ]


def show_ttft(console: Console, compared: Sequence[Compared]) -> None:
    shown = Table(title="TTFT in ms: computed | published (error)", title_justify="left")
    for column in ("model", "tokens", *STRATEGIES, "fastest computed", "fastest published"):
        shown.add_column(column, justify="right" if column in {"tokens", *STRATEGIES} else "left")
    for each in compared:
        cells = [
            f"{ours:,.0f} | {theirs:,.0f} ({ours / theirs - 1:+.0%})"
            for ours, theirs in zip(each.computed, each.published, strict=True)
        ]
        where = f"{each.table.model}, 4 x {each.table.device}"
        mark = "" if each.agrees else " (!)"
        shown.add_row(where, f"{each.tokens:,}", *cells, best(each.computed), best(each.published) + mark)
    console.print(shown)


# Switches ----------------------------------------------------------------------------------------------------------------


def show_brackets(console: Console) -> float:
    """Prints each bracket and the bandwidths for which it holds; the share that holds as assumed."""
    shown = Table(title="Brackets of the published tables, all else as above", title_justify="left")
    for column in (
        "model",
        "bracket",
        "reproduced",
        f"holds for a bus bandwidth of (GB/s; tried {BANDWIDTHS[0]} to {BANDWIDTHS[-1]:.0f})",
        "missed at, by",
    ):
        shown.add_column(column)
    held = []
    for bracket in brackets():
        group = group_of(bracket.table.device)
        missed = bracket.missed(group)
        held.append(not missed)
        inside = [each for each in BANDWIDTHS if not bracket.missed(with_bandwidth(group, each))]
        span = f"{inside[0]:.2g} to {inside[-1]:.3g}" if inside else "none"
        where = ", ".join(f"{tokens:,}: {margin:.1%}" for tokens, margin in missed.items())
        shown.add_row(bracket.table.model, bracket.text, "no" if missed else "yes", span, where)
    console.print(shown)
    return fmean(held)


def show_own_gathers(console: Console) -> None:
    """The brackets again, fitted: weights are gathered as fast as each table's own row of one token says."""
    held, rates = [], []
    for bracket in brackets():
        rate = gathers_gigabytes_per_second(bracket.table)
        group = group_of(bracket.table.device)
        gathers = {Collective.ALL_GATHER: rate / (group.link.gbps / 8)}
        held.append(not bracket.missed(replace(group, link_shares={**group.link_shares, **gathers})))
        rates.append(f"{rate:.3g}")
    console.print(
        f"with gathers at the rate of each table's own one-token row ({', '.join(dict.fromkeys(rates))} GB/s, "
        f"fitted to that row): {sum(held)} of {len(held)} brackets"
    )


def show_variants(console: Console) -> None:
    shown = Table(title="Switches on 4 x L4 under other assumptions", title_justify="left")
    for column in ("links", "model", "table of strategies", "brackets held", "mean TTFT error"):
        shown.add_column(column)
    for text, group in variants():
        for table in TABLES[:2]:
            switches = " ".join(f"{start:,}: {name}" for start, name in strategy_table(table.shapes, group, 65536))
            held = [not bracket.missed(group) for bracket in brackets() if bracket.table is table]
            errors = [
                abs(ours / theirs - 1)
                for tokens, published in table.milliseconds.items()
                if tokens >= SHORTEST
                for ours, theirs in zip(ttft_milliseconds(table, group, tokens), published, strict=True)
            ]
            shown.add_row(text, table.model, switches, f"{sum(held)} of {len(held)}", f"{fmean(errors):.1%}")
    console.print(shown)


def show_paper_rules(console: Console) -> None:
    """Section 5.2's two rules with section 7.1's figures, and what the published table says at that length."""
    peaks = {"L4": (242e12, 64e9), "A100-80GB": (624e12, 600e9)}
    console.print("The paper's own rules (section 5.2), with the figures that it prints:")
    for table in TABLES:
        model, (flops, bandwidth) = table.shapes, peaks[table.device]
        strategies = find_strategies(gated=True).strategies
        sizes = sizes_of(model.layers[0], model.hidden_size) | {"g": 4, "n": 1}
        costs = {name: each.costs(Volume.PAPER) for name, each in strategies.items()}
        first = costs["megatron"]
        ratio = first.communication_bytes.value(**sizes) / bandwidth / (first.weight_flops.value(**sizes) / flops)
        gathered = costs["weight-gathered"].communication_bytes
        console.print(
            f"  {table.model}: communication / compute of Megatron = {ratio:.2f} at every length; "
            f"WeightGathered moves less than ProjectionReplicated from n = "
            f"{_crossing(costs['projection-replicated'].communication_bytes, gathered, sizes):,.0f} (3 m = {3 * sizes['m']:,}), "
            f"less than Megatron from n = {_crossing(first.communication_bytes, gathered, sizes):,.0f}"
        )


def _crossing(left: Polynomial, right: Polynomial, sizes: dict[str, int]) -> float:
    """The n from which the second line lies below the first."""
    at = [[each.value(**(sizes | {"n": n})) for n in (0, 1)] for each in (left, right)]
    slope = (at[0][1] - at[0][0]) - (at[1][1] - at[1][0])
    return (at[1][0] - at[0][0]) / slope


# The front ---------------------------------------------------------------------------------------------------------------

REASONS = (
    "named: the runtime's",
    "holds more weights than the layout",
    "repeats QKV's or the MLP's products on every device",
    "brings QKV or W0 on every pass",
    "holds and brings no more; not in the paper's set",
)


def reason(found: Found, strategy: Strategy) -> str:
    """Why a strategy of the front is not the runtime's."""
    if recognised(strategy) and found.fits(strategy):
        return REASONS[0]
    if not found.fits(strategy):
        return REASONS[1]
    if any(states == (R, R) for name, states in strategy.products.items() if name != "w0"):
        return REASONS[2]
    if any(move.weight in {"qkv", "w0"} for move in strategy.moves):
        return REASONS[3]
    return REASONS[4]


def show_front(console: Console) -> int:
    """Prints what else no strategy dominates and how fast it would be; how many strategies of unlike costs there are."""
    found = find_strategies(gated=True, convention=Volume.TRAFFIC)
    unlike = {strategy.costs(Volume.TRAFFIC): strategy for strategy in sorted(found.front, key=found.fits)}
    cases = [(TABLES[0], 1024), (TABLES[0], 16192), (TABLES[0], 32384), (TABLES[2], 16192), (TABLES[2], 64768)]
    shown = Table(
        title="The front (traffic as a ring sends it): fastest of each kind, seconds over the fastest of the three",
        title_justify="left",
    )
    shown.add_column("why not the runtime's")
    shown.add_column("strategies", justify="right")
    for table, tokens in cases:
        shown.add_column(f"{table.model.removeprefix('llama-2-')} {tokens:,}", justify="right")
    shown.add_column("GiB of 7b")
    shown.add_column("fastest of the kind at 32,384 of 7b")
    for each in REASONS[:-1]:
        members = [strategy for strategy in unlike.values() if reason(found, strategy) == each]
        _add_kind(shown, found, each, members, cases)
    for strategy in (strategy for strategy in unlike.values() if reason(found, strategy) == REASONS[-1]):
        _add_kind(shown, found, REASONS[-1], [strategy], cases)
    console.print(shown)
    return len(unlike)


def _add_kind(
    shown: Table, found: Found, kind: str, members: Sequence[Strategy], cases: Sequence[tuple[Published, int]]
) -> None:
    ratios = [_over_named(found, members, table, tokens) for table, tokens in cases]
    chosen = ratios[2][1]
    sizes = sizes_of(TABLES[0].shapes.layers[0], TABLES[0].shapes.hidden_size) | {"g": 4}
    gibibytes = chosen.costs(Volume.PAPER).weight_bytes.value(**sizes) * TABLES[0].shapes.num_layers / 2**30
    cells = [f"{ratio:.2f}" for ratio, _ in ratios]
    shown.add_row(kind, str(len(members)), *cells, f"{gibibytes:.1f}", str(chosen))


def _over_named(found: Found, members: Sequence[Strategy], table: Published, tokens: int) -> tuple[float, Strategy]:
    model, group = table.shapes, group_of(table.device)

    def seconds(strategy: Strategy) -> float:
        return layer_seconds(strategy, model.layers[0], model.hidden_size, group, tokens).total

    chosen = min(members, key=seconds)
    return seconds(chosen) / min(map(seconds, found.strategies.values())), chosen


# Rows --------------------------------------------------------------------------------------------------------------------


def search_seconds() -> float:
    started = time.process_time()
    pareto_front(decoder_chain(gated=True), Volume.PAPER)
    return time.process_time() - started


def measure(data: Path | None) -> list[Row]:
    console = Console(width=190)
    seconds = search_seconds()
    cells = symbolic(console)
    compared = compare()
    show_ttft(console, compared)
    held = show_brackets(console)
    show_own_gathers(console)
    show_variants(console)
    show_paper_rules(console)
    unlike = show_front(console)
    long = [each for each in compared if each.tokens >= SHORTEST]
    errors = {
        "l4": [error for each in long if each.table.device == "L4" for error in each.errors],
        "a100": [error for each in long if each.table.device != "L4" for error in each.errors],
    }
    bandwidth = helix_bandwidth(data) if data else None
    if bandwidth is None:
        console.print("partition_bus_l4 is skipped: give Helix's tables with --data DIR or STRATA_SHARED_DATA")
    peer = "DynPart, published"
    sequences = float(count_sequences(decoder_chain(gated=True)))
    return [
        Row("partition_search_seconds", seconds, "s, all sizes at once"),
        Row("partition_sequences", sequences, "valid strategies", "DynPart: hundreds of thousands"),
        Row("partition_front", float(unlike), "of unlike costs"),
        Row("partition_symbolic_equal", cells, "share of table 4.1", peer, goal=1.0),
        Row("partition_brackets", held, "share reproduced", peer, goal=1.0),
        Row("partition_fastest_agrees", fmean(each.agrees for each in compared), "share of 20 lengths", peer),
        Row("partition_regret_mean", fmean(each.regret for each in compared), "of the best published TTFT", peer),
        Row("partition_regret_worst", max(each.regret for each in compared), "of the best published TTFT", peer),
        *(
            row
            for name, values in errors.items()
            for row in (
                Row(f"partition_ttft_error_{name}", fmean(values), "computed vs published, >= 1024", peer),
                Row(f"partition_ttft_worst_{name}", max(values), "computed vs published, >= 1024", peer),
            )
        ),
        Row(
            "partition_ttft_error_1",
            fmean(error for each in compared if each.tokens < SHORTEST for error in each.errors),
            "computed vs published, 1 token",
            peer,
        ),
        *([] if bandwidth is None else [Row("partition_bus_l4", bandwidth, "GB/s, from Helix's tables")]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=os.environ.get("STRATA_SHARED_DATA"))
    chosen, rest = parser.parse_known_args()
    run("partition", lambda: measure(Path(chosen.data) if chosen.data else None), rest)


if __name__ == "__main__":
    main()
