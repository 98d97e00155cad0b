"""Strategies of a stage of two ranks, switched by the tokens of a step: does the measured table choose the fastest, and what does that gain?

`python -m benchmarks.strategies [--json FILE] [--picture FILE.svg]`, some three minutes on two quiet cores, one a rank. Real ranks on layers of a narrow
shape, where sums weigh most. The table is made of one measurement and judged by another one, at other times.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, run
from benchmarks.scatter import curves_svg
from strata_planner.contract.formats import FormatName
from strata_planner.contract.latencies import StrategyPoint
from strata_planner.contract.strategies import StrategyName, StrategyTable, strategy_for, told
from strata_planner.partition.measured import measured_table
from strata_runtime.measuring.profiling.stage import StageSpec
from strata_runtime.measuring.profiling.strategies import LAYERS, LENGTHS, measure_strategies, switching_stage

RANKS = 2
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": LENGTHS[-1],
}
ALIKE = 1.03  # a choice within this of the fastest is as good
Seconds = dict[int, dict[StrategyName, float]]


def seconds_of(points: Sequence[StrategyPoint]) -> Seconds:
    """Tokens -> strategy -> seconds of a layer."""
    found: Seconds = {}
    for point in points:
        found.setdefault(point.tokens, {})[point.strategy] = point.layer_seconds
    return found


def judged(table: StrategyTable, seconds: Seconds) -> list[Row]:
    chosen = {tokens: strategy_for(table, tokens, decoding=False) for tokens in seconds}
    good = [taken[chosen[tokens]] <= ALIKE * min(taken.values()) for tokens, taken in seconds.items()]
    names = next(iter(seconds.values())).keys()
    totals = {name: math.prod(taken[name] / min(taken.values()) for taken in seconds.values()) for name in names}
    single = min(totals, key=lambda name: totals[name])
    gains = {tokens: taken[single] / taken[chosen[tokens]] for tokens, taken in seconds.items()}
    over_worst = max(max(taken.values()) / taken[chosen[tokens]] for tokens, taken in seconds.items())
    at = max(gains, key=lambda tokens: gains[tokens])
    return [
        Row("strategy_choice", sum(good) / len(good), "of lengths", "fastest, or within 3 %", goal=0.95),
        Row("strategy_gain", min(gains.values()), "least of all lengths", f"{single} alone", goal=1.0),
        Row("strategy_gain_largest", gains[at], f"at {at} tokens", f"{single} alone"),
        Row("strategy_over_worst", over_worst, "largest of all lengths", "the slowest one"),
    ]


def measure(picture: Path | None) -> list[Row]:
    dense: FormatName = "dense"
    spec = StageSpec((dense,) * LAYERS, "bfloat16", LENGTHS[-1], LENGTHS[-1])
    with switching_stage(FIELDS, RANKS, spec, 1) as stage:
        table = measured_table(measure_strategies(stage, LENGTHS, _quiet))
        seconds = seconds_of(measure_strategies(stage, LENGTHS, _quiet))
    sys.stdout.write(f"measured table: {told(table)}\n")
    for tokens, taken in seconds.items():
        own = taken["megatron"]
        told_of = ", ".join(f"{name} {value * 1e3:.2f} ms ({value / own:.3f})" for name, value in taken.items())
        mark = strategy_for(table, tokens, decoding=False)
        sys.stdout.write(f"{tokens:>6} tokens: {told_of}; chosen {mark}\n")
    if picture:
        title = f"One layer over {RANKS} ranks: seconds beside Megatron's; marked: what the table chooses"
        curves: dict[str, list[tuple[float, float]]] = {
            name: [(tokens, taken[name] / taken["megatron"]) for tokens, taken in seconds.items()]
            for name in next(iter(seconds.values()))
        }
        marked: dict[float, str] = {tokens: strategy_for(table, tokens, decoding=False) for tokens in seconds}
        picture.write_text(curves_svg(curves, marked, title, "tokens of a step"), encoding="utf-8")
    return judged(table, seconds)


def _quiet(_done: int, _total: int, _what: str) -> None:
    pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--picture", type=Path)
    known, rest = parser.parse_known_args()
    run("strategies", lambda: measure(known.picture), rest)
