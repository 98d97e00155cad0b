"""The benchmark beside other engines: which rows come of what was measured, what counts as decoding, which setting of an engine stays, how it reads a checkpoint."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks import engine_rows
from benchmarks.engine_rows import (
    BITS,
    CELLS,
    LEAST_BITS,
    MEMORY,
    OURS,
    ROUNDED,
    ROUNDED_BITS,
    THREADS,
    Measured,
    gateway_row,
)
from benchmarks.peers import checkpoint, served
from benchmarks.peers.environments import PEERS
from benchmarks.peers.served import Moments
from benchmarks.rows import LISTED
from benchmarks.slots import Heard

RATES = st.lists(st.floats(1, 1000), min_size=1, max_size=5)
BYTES = dict.fromkeys((*BITS, LEAST_BITS), 1e8)


def everything() -> list[Measured]:
    """Every engine in every cell that it has."""
    found = []
    for threads, bits in itertools.product(THREADS, (*BITS, LEAST_BITS)):
        found.append(Measured(MEMORY, "decode_1", bits, threads, (2e10,)))
        for cell in CELLS if bits in BITS else ("decode_1",):
            found.append(Measured(OURS, cell, bits, threads, (100.0,)))
            found += [Measured(ROUNDED, cell, bits, threads, (90.0,))] * (bits in ROUNDED_BITS)
            found += [Measured(peer.title, cell, bits, threads, (50.0,)) for peer in PEERS if bits in peer.formats]
    return found


def test_a_whole_run_has_every_listed_row_once() -> None:
    rows = engine_rows.rows_of(everything(), (), BYTES)
    rows += [gateway_row(streams, (1.0,), (1.0,)) for streams in (16, 64)]
    assert sorted(row.name for row in rows) == sorted(LISTED["engine"])


@given(own=RATES, peers=st.dictionaries(st.sampled_from(["a", "b", "c"]), RATES, min_size=1))
def test_a_cell_is_met_when_no_peer_is_faster(own: list[float], peers: dict[str, list[float]]) -> None:
    ours = Measured(OURS, "decode_16", 8, 2, own)
    others = [Measured(name, "decode_16", 8, 2, rates) for name, rates in peers.items()]
    elsewhere = [Measured("a", "decode_16", 8, 1, (1e6,)), Measured("a", "decode_16", 4, 2, (1e6,))]
    (row,) = engine_rows.peer_rows([*elsewhere, ours, *others], ())
    assert row.name == "decode_16_8_bits_2_threads"
    assert row.met == all(ours.rate >= other.rate for other in others)
    assert row.peer is not None
    assert all(name in row.peer for name in peers)


def test_what_rounds_activations_is_held_to_the_same_peers_in_rows_of_its_own() -> None:
    measured = [Measured(name, "decode_1", 4, 1, (rate,)) for name, rate in ((OURS, 8.0), (ROUNDED, 12.0), ("a", 10.0))]
    rows = {row.name: row for row in engine_rows.peer_rows(measured, ())}
    assert {name: row.met for name, row in rows.items()} == {"decode_1_4_bits": False, "decode_1_4_bits_a8": True}


def test_without_a_peer_nothing_is_met_and_the_row_says_who_is_missing() -> None:
    (row,) = engine_rows.peer_rows([Measured(OURS, "decode_1", 16, 1, (1e9,))], ["llama.cpp"])
    assert not row.met
    assert "llama.cpp" in str(row.peer)


def test_ratios_of_ours_alone() -> None:
    measured = [
        Measured(OURS, "decode_1", 16, 1, (10.0,)),
        Measured(OURS, "decode_1", 16, 2, (15.0,)),
        Measured(OURS, "decode_1", 8, 1, (20.0,)),
        Measured(MEMORY, "decode_1", 8, 1, (4e9,)),
    ]
    ratios = {row.name: row.ratio for row in engine_rows.rows_of(measured, (), BYTES) if row.value}
    assert ratios == {
        "threads_decode_1_16_bits": pytest.approx(1.5),
        "bandwidth_share_8_bits": pytest.approx(0.5),
        "eight_never_slower_decode_1": pytest.approx(2.0),
    }


@given(
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=16),
    step=st.integers(1, 50),
    answer=st.integers(30, 60),
    stalled=st.integers(0, 1000),
)
def test_decoding_is_timed_while_all_sequences_decode(starts: list[int], step: int, answer: int, stalled: int) -> None:
    """However their prompts came and however long: the pace of n sequences that each have a token a step."""
    last = max(starts)
    moments = [
        [place * step + (stalled if place >= last else 0) for place in range(start, start + answer)] for start in starts
    ]
    heard = Heard(moments)
    assert heard.prompts_seconds == last * step + stalled
    assert heard.decode_rate == pytest.approx(len(starts) / step)


class Fixed:
    """An engine whose seconds are known."""

    def __init__(self, first: float, rest: float) -> None:
        self._moments = Moments(first, first + rest)

    def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
        assert prompts
        return self._moments if answer > 1 else Moments(self._moments.first, self._moments.first)


@pytest.mark.parametrize(("answer", "chosen"), [(1, "prompts"), (8, "tokens")])
def test_the_setting_that_is_the_fastest_for_the_cell_stays(answer: int, chosen: str) -> None:
    engines = {"prompts": Fixed(1, 5), "tokens": Fixed(4, 2), "neither": Fixed(2, 3)}
    assert served._fastest(engines, [[1, 2]], answer) == chosen


def test_a_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    read = dict(checkpoint.tensors(tmp_path))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(torch.tensor(read[name]), value.float()) for name, value in tensors.items())


def test_other_types_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a is F32: only checkpoints in BF16 are read"):
        list(checkpoint.tensors(tmp_path))
