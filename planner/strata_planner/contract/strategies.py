"""Strategies of a stage of several devices: in which ways it may run a layer, and from how many tokens of a step on it runs each (DynPart, EECS-2024-108).

All run from the same stored weights, so a stage changes its strategy between two steps at no cost. The planner finds and prices them (`partition`), the
runtime runs them on processors (docs/tensor-partition.md).
"""

from typing import Literal, get_args

from strata_planner.contract.devices import is_processor
from strata_planner.contract.formats import FormatName

StrategyName = Literal["megatron", "projection-replicated", "weight-gathered"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
# (first number of tokens, what runs from there on), ascending; the first entry is of 1 token.
StrategyTable = tuple[tuple[int, StrategyName], ...]

MEGATRON_ONLY: StrategyTable = ((1, "megatron"),)
# Models whose dense layers go as Llama's do, operation by operation: the others run Megatron alone. What the law of strategies covers.
SWITCHED = frozenset(
    {
        "arcee",
        "ernie4_5",
        "gemma",
        "glm",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "olmo",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
SWITCHED_FORMATS: tuple[FormatName, ...] = ("dense", "int8")  # that one rank can multiply by another's part of


def strategy_for(table: StrategyTable, tokens: int, *, decoding: bool) -> StrategyName:
    """What a step of so many tokens runs."""
    if decoding:
        return "megatron"
    return next((name for start, name in reversed(table) if start <= max(tokens, 1)), "megatron")


def switches(table: StrategyTable) -> bool:
    """Whether any step runs something else than Megatron."""
    return any(name != "megatron" for _, name in table)


def why_not_switched(model_type: str, formats: tuple[FormatName, ...], device_type: str) -> str:
    """Why a stage of several devices runs Megatron alone, whatever would be faster; empty: it may switch."""
    if not is_processor(device_type):
        return f"several {device_type} do not read each other's weights"
    if model_type not in SWITCHED:
        return f"layers of '{model_type}' do not go as Llama's dense ones do"
    if not set(formats) & set(SWITCHED_FORMATS):
        return f"no layer is stored in {' or '.join(SWITCHED_FORMATS)}"
    return ""


def told(table: StrategyTable) -> str:
    """As people read it."""
    return ", ".join(f"{name} from {tokens:,} tokens" for tokens, name in table)
