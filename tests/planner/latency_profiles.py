"""A latency profile of a device that keeps a law exactly, for tests of what reads profiles."""

from collections.abc import Callable, Sequence
from typing import Any

from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.latencies import (
    LATENCY_PROFILE_VERSION,
    HeadPoint,
    KernelRange,
    LatencyPoint,
    LatencyProfile,
    LinearShape,
    PhaseName,
    ProfiledDevice,
    ProfiledModel,
)
from tests.planner.builders import a_model

FORMATS: tuple[FormatName, ...] = ("dense", "int8", "int4", "int3")
ROW_SIZES, ROW_MULTIPLE = (1, 2, 4, 8, 16, 32, 64, 128), 128
PACKED_ROWS = 16  # of quantized formats; another kernel beyond


def rows_of(tokens: int) -> int:
    return next((size for size in ROW_SIZES if size >= tokens), -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE)


def kernel_of(name: FormatName, rows: int) -> str:
    return "dense" if name == "dense" else "packed" if rows <= PACKED_ROWS else "unpacked"


def law(name: FormatName, sequences: int, tokens: int, past: float) -> float:
    """Seconds of a layer: reading weights or unpacking them, arithmetic by rows, and attention."""
    rows = rows_of(sequences * tokens)
    packed = kernel_of(name, rows) == "packed"
    linears = (
        BITS_OF_FORMAT[name] * 1e-5 + rows * (4e-5 if packed else 1e-5) + (0 if packed or name == "dense" else 3e-4)
    )
    if tokens == 1:
        return linears + 2e-7 * sequences * (past + 1)
    return linears + 1e-6 * sequences + 3e-8 * sequences * tokens * (tokens if not past else 2 * (tokens + past))


def a_point(name: FormatName, phase: PhaseName, sequences: int, tokens: int, past: int) -> LatencyPoint:
    staggered = (sequences - 1) / 2 if phase == "decode" else 0
    seconds = law(name, sequences, tokens, past + staggered)
    kernel = kernel_of(name, rows_of(sequences * tokens))
    return LatencyPoint(name, kernel, phase, sequences, tokens, past, seconds, 1e-4 + 1e-5 * sequences)


def the_points(name: FormatName) -> list[LatencyPoint]:
    decode = [a_point(name, "decode", v, 1, past) for v in (1, 2, 4, 8, 16, 32, 64) for past in (16, 128, 512)]
    fresh = [a_point(name, "prefill", v, s, 0) for v in (1, 2, 4) for s in (8, 16, 32, 64, 128, 256, 512, 1024)]
    return [*decode, *fresh, *(a_point(name, "prefill", 1, s, past) for s in (128, 512, 1024) for past in (256, 1024))]


def a_latency_profile(
    points: Callable[[FormatName], list[LatencyPoint]] = the_points,
    formats: Sequence[FormatName] = FORMATS,
    **changes: Any,
) -> LatencyProfile:
    """Of the layers of `builders.a_model`, on one thread."""
    model = a_model()
    layer = model.layers[0]
    fields: dict[str, Any] = {
        "version": LATENCY_PROFILE_VERSION,
        "device": ProfiledDevice("cpu", "a processor", 1, "2.0"),
        "compute_type": "bfloat16",
        "kv_bits": 16,
        "model": ProfiledModel(
            architecture="llama",
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            linears=tuple(sorted(LinearShape(each.out_features, each.in_features) for each in layer.linears)),
        ),
        "layers": dict.fromkeys(formats, 3),
        "row_sizes": ROW_SIZES,
        "row_multiple": ROW_MULTIPLE,
        "max_step_tokens": 2048,
        "kernels": tuple(
            KernelRange(name, kernel_of(name, rows), rows)
            for name in formats
            for rows in ([2048] if name == "dense" else [PACKED_ROWS, 2048])
        ),
        "points": tuple(point for name in formats for point in points(name)),
        "head": tuple(HeadPoint(rows, 1e-3 + 1e-4 * rows) for rows in ROW_SIZES),
    }
    return LatencyProfile(**(fields | changes))
