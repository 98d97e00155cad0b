"""Layer tables from files that others published: LLM-PQ's notebooks and the Helix artifact.

Called by the benchmarks, and by whoever turns such files into a table for `strata plan --costs`. The caller says which layer
was measured and what its device types are called here: the files do not.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from strata_planner.costs.tables import LayerTable, Points, TableShape
from strata_planner.errors import InputError

LLMPQ_COLUMNS = ("device", "bits", "batch", "prefill_ms_512_tokens", "decode_ms_past_512")
LLMPQ_TOKENS = 512
LLMPQ_SOURCE = "LLM-PQ authors' notebooks (kernels of 2023)"
HELIX_SOURCE = "Helix (ASPLOS 2025) artifact"


def llmpq_tables(file: Path, layer: TableShape, devices: Mapping[str, Sequence[str]]) -> tuple[LayerTable, ...]:
    """Columns: device, bits, batch, prefill_ms_512_tokens, decode_ms_past_512. `devices`: the file's names -> ours.

    Raises InputError with the row.
    """
    rows = _rows(file)
    if not rows or tuple(rows[0]) != LLMPQ_COLUMNS:
        raise InputError(f"{file}, row 1: the columns must be {', '.join(LLMPQ_COLUMNS)}")
    found: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for number, row in enumerate(rows[1:], 2):
        device, *cells = row
        bits, batch, prefill, decode = _numbers(file, number, cells, 4)
        found.setdefault(device, {}).setdefault(int(bits), []).append((batch, prefill, decode))
    tables = tuple(
        LayerTable(
            devices=tuple(devices.get(device, (device,))),
            source=LLMPQ_SOURCE,
            layer=layer,
            prefill_milliseconds={
                bits: tuple((batch * LLMPQ_TOKENS, prefill) for batch, prefill, _ in points)
                for bits, points in by_bits.items()
            },
            decode_milliseconds={
                bits: tuple((batch, decode) for batch, _, decode in points) for bits, points in by_bits.items()
            },
            prompt_tokens=LLMPQ_TOKENS,
            past_tokens=LLMPQ_TOKENS,
        )
        for device, by_bits in found.items()
    )
    return _checked(file, tables)


def helix_table(folder: Path, layer: TableShape, devices: Sequence[str]) -> LayerTable:
    """One machine's prompt_bs2time.csv (tokens, milliseconds) and decode_bs2time.csv (sequences, milliseconds), 16 bits.

    Raises InputError with the row.
    """
    table = LayerTable(
        devices=tuple(devices),
        source=f"{HELIX_SOURCE}, {folder.name}",
        layer=layer,
        prefill_milliseconds={16: _pairs(folder / "prompt_bs2time.csv")},
        decode_milliseconds={16: _pairs(folder / "decode_bs2time.csv")},
    )
    return _checked(folder, (table,))[0]


def _pairs(file: Path) -> Points:
    """Without the row of zero, which says nothing about a micro-batch."""
    pairs = [_numbers(file, number, row, 2) for number, row in enumerate(_rows(file), 1)]
    return tuple((at, milliseconds) for at, milliseconds in pairs if at > 0)


def _rows(file: Path) -> list[list[str]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return [row for row in csv.reader(lines) if row]
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; name a table that can be read") from error


def _numbers(file: Path, number: int, cells: Iterable[str], count: int) -> list[float]:
    row = list(cells)
    try:
        values = [float(cell) for cell in row]
    except ValueError as error:
        raise InputError(f"{file}, row {number}: {row} must be numbers") from error
    if len(values) != count:
        raise InputError(f"{file}, row {number}: {len(values)} numbers where {count} are needed")
    return values


def _checked(file: Path, tables: tuple[LayerTable, ...]) -> tuple[LayerTable, ...]:
    for table in tables:
        table.check(f"{file} ({', '.join(table.devices)})")
    return tables
