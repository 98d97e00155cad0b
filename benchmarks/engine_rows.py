"""The rows of `benchmarks.engine` from what was measured. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.rows import Row

OURS, MEMORY = "Strata", "memory"
ROUNDED = "Strata, 8-bit activations"  # as the peers round theirs at 8 and 4 bits
CELLS = ("decode_1", "decode_16", "prefill_512")
BITS = (16, 8, 4)
ROUNDED_BITS = (8, 4)
LEAST_BITS = 3  # of which only the share of the memory's rate is told
THREADS = (1, 2)
THREADS_GOALS = {"decode_1": 1.2, "decode_16": 1.8, "prefill_512": 1.8}
SHARE_GOAL, GATEWAY_GOAL = 0.85, 0.95


@dataclass(frozen=True)
class Measured:
    """Of one engine in one cell: tokens a second of each round; of the memory, bytes. `setting`: the one of its settings that was the fastest."""

    engine: str
    cell: str
    bits: int
    threads: int
    rates: Sequence[float]
    setting: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def name_of(what: str, threads: int) -> str:
    """`decode_1_16_bits`, `decode_1_16_bits_2_threads`."""
    return what if threads == 1 else f"{what}_{threads}_threads"


def rows_of(measured: Sequence[Measured], absent: Iterable[str], bytes_a_token: Mapping[int, float]) -> list[Row]:
    """`absent`: peers that could not be asked, as people call them. `bytes_a_token`: what one sequence reads for a token, by bits."""
    return [
        *peer_rows(measured, tuple(absent)),
        *thread_rows(measured),
        *share_rows(measured, bytes_a_token),
        *eight_rows(measured),
    ]


def peer_rows(measured: Sequence[Measured], absent: Sequence[str]) -> list[Row]:
    """Ours over the best of the others in the same cell. Without any there is a row without a value: nothing was compared."""
    rows = []
    for own in (each for each in measured if each.engine in {OURS, ROUNDED}):
        others = [each for each in measured if _cell(each) == _cell(own) and each.engine not in {OURS, ROUNDED, MEMORY}]
        others.sort(key=lambda each: -each.rate)
        mark = "" if own.engine == OURS else "_a8"
        name = name_of(f"{own.cell}_{own.bits}_bits{mark}", own.threads)
        without = f"; not here: {', '.join(absent)}" if absent else ""
        if others:
            peer = ", ".join(f"{each.engine} {each.rate:.4g}" for each in others) + without
            rows.append(_over(name, own.rate, peer, others[0].rate, 1.0))
        elif own.bits in BITS:
            rows.append(Row(name, None, f"no peer; ours {own.rate:.4g} tokens/s", f"none{without}", goal=1.0))
    return rows


def thread_rows(measured: Sequence[Measured]) -> list[Row]:
    """Two threads over one."""
    ours = {_cell(each): each for each in _of(measured, OURS)}
    return [
        _over(f"threads_{cell}_{bits}_bits", two.rate, "one thread", ours[cell, bits, 1].rate, THREADS_GOALS[cell])
        for (cell, bits, threads), two in ours.items()
        if threads == max(THREADS) and bits in BITS and (cell, bits, 1) in ours
    ]


def share_rows(measured: Sequence[Measured], bytes_a_token: Mapping[int, float]) -> list[Row]:
    """Bytes a second that one sequence reads, over those that a sweep reads in the same turns with as many threads."""
    ours = {_cell(each): each for each in _of(measured, OURS)}
    rows = []
    for stream in _of(measured, MEMORY):
        own = ours[_cell(stream)]
        used = own.rate * bytes_a_token[own.bits]
        name = name_of(f"bandwidth_share_{own.bits}_bits", own.threads)
        ratio = used / stream.rate
        rows.append(Row(name, used / 1e9, "GB/s", "a sweep of memory", stream.rate / 1e9, ratio, SHARE_GOAL))
    return rows


def eight_rows(measured: Sequence[Measured]) -> list[Row]:
    """8 bits over 16."""
    ours = {_cell(each): each for each in _of(measured, OURS)}
    return [
        _over(name_of(f"eight_never_slower_{cell}", threads), eight.rate, "16 bits", ours[cell, 16, threads].rate, 1)
        for (cell, bits, threads), eight in ours.items()
        if bits == 8 and (cell, 16, threads) in ours
    ]


def gateway_row(streams: int, over_http: Sequence[float], own: Sequence[float]) -> Row:
    pair = statistics.median(over_http), statistics.median(own)
    return _over(f"gateway_cost_{streams}", pair[0], "the slot's own", pair[1], GATEWAY_GOAL)


def _of(measured: Iterable[Measured], engine: str) -> list[Measured]:
    return [each for each in measured if each.engine == engine]


def _cell(one: Measured) -> tuple[str, int, int]:
    return one.cell, one.bits, one.threads


def _over(name: str, value: float, peer: str, peer_value: float, goal: float) -> Row:
    return Row(name, value, "tokens/s", peer, peer_value, value / peer_value, goal)
