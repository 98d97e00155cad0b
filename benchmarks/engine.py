"""Our engine on one processor beside the best engines on the same processor, and beside what the processor's memory gives.

`python -m benchmarks.engine [--json FILE] [--quick] [--peers llama_cpp,openvino]`. The first run installs the peers, one of which is compiled for a quarter of an hour. A
random Llama of 246 million parameters (`benchmarks.pipeline`'s), prompts of 64 tokens. Engines take turns in every cell, each bound to as many processors as it has threads;
medians of five. Decoding is timed from the first token to the last, prompts until their first token.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import pipeline
from benchmarks.engine_contenders import SIZES, Contender, Ours, Peers, bytes_a_token, described, plan
from benchmarks.engine_rows import BITS, CELLS, LEAST_BITS, MEMORY, ROUNDED_BITS, THREADS, Measured, rows_of
from benchmarks.engine_serving import measure_serving
from benchmarks.peers.environments import PEERS
from benchmarks.peers.process import PeerError
from benchmarks.rows import Row, run
from benchmarks.self_drafts import own_cache
from benchmarks.slots import served
from strata_planner.contract.store import cache_folder


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    rounds: int = 5
    threads: Sequence[int] = THREADS
    cells: Sequence[str] = CELLS
    streams: Sequence[int] = (16, 64)


QUICK = Extent(rounds=1, threads=(1,), cells=("decode_1", "prefill_512"), streams=(16,))


@dataclass
class Measuring:
    """One run over all formats and threads."""

    model: Path
    scratch: Path
    peers: Peers
    extent: Extent
    found: list[Measured] = field(default_factory=list)
    bytes_a_token: dict[int, float] = field(default_factory=dict)

    def all(self) -> None:
        for threads in self.extent.threads:
            for bits in (*BITS, LEAST_BITS):
                self._format(bits, threads)

    def _format(self, bits: int, threads: int) -> None:
        """Every engine that has this format, in turn; of the least bits ours and the memory alone."""
        with self.peers.started(self.model, bits, threads, self.scratch) as others:
            for name in self.extent.cells if bits in BITS else ("decode_1",):
                wanted = plan(self.model, SIZES[name], bits, threads)
                _say(f"{name}, {bits} bits, threads {threads}: {described(wanted)}")
                if name == "decode_1":
                    self.bytes_a_token[bits] = bytes_a_token(self.model, wanted)
                taking_part = [each for each in others if each.title != MEMORY or name == "decode_1"]
                with ExitStack() as stack:
                    own = [Ours(stack.enter_context(served(wanted, threads)))]
                    if bits in ROUNDED_BITS:
                        rounding = plan(self.model, SIZES[name], bits, threads, rounds=True)
                        _say(f"  with 8-bit activations: {described(rounding)}")
                        own.append(Ours(stack.enter_context(served(rounding, threads)), rounds=True))
                    self._cell(name, bits, threads, [*own, *taking_part])

    def _cell(self, name: str, bits: int, threads: int, contenders: Sequence[Contender]) -> None:
        rates: dict[str, list[float]] = {each.title: [] for each in contenders}
        for _ in range(self.extent.rounds + 1):
            for each in [each for each in contenders if each.title in rates]:
                try:
                    rates[each.title].append(each.rate(SIZES[name]))
                except PeerError as error:
                    del rates[each.title]
                    self.peers.drop(f"{each.title} in {name} at {bits} bits on {threads} threads", str(error))
        told = [  # the first round makes kernels and chooses settings
            Measured(each.title, name, bits, threads, rates[each.title][1:], each.setting)
            for each in contenders
            if each.title in rates
        ]
        _say("  " + ", ".join(f"{each.engine} {each.rate:.4g}" for each in told))
        self.found += told


def table(found: Sequence[Measured]) -> Table:
    shown = Table(title="tokens/s of every engine; the memory's GB/s", title_justify="left")
    for column in ("threads", "bits", "cell", "engine", "median", "least", "most", "setting"):
        shown.add_column(column, justify="right" if column in {"median", "least", "most"} else "left")
    for each in found:
        scale = 1e9 if each.engine == MEMORY else 1.0
        figures = (f"{rate / scale:,.4g}" for rate in (each.rate, min(each.rates), max(each.rates)))
        shown.add_row(str(each.threads), str(each.bits), each.cell, each.engine, *figures, each.setting)
    return shown


def measure(names: Sequence[str], extent: Extent) -> list[Row]:
    peers = Peers(names, cache_folder() / "peers")
    with tempfile.TemporaryDirectory() as name, own_cache(Path(name) / "cache"):
        folder = Path(name)
        measuring = Measuring(pipeline.make_model(folder), folder, peers, extent)
        measuring.all()
        Console(width=150).print(table(measuring.found))
        serving = measure_serving(measuring.model, folder, extent.rounds, extent.streams)
    for title, reason in peers.reasons.items():
        print(f"without {title}: {reason}")
    return [*rows_of(measuring.found, peers.reasons, measuring.bytes_a_token), *serving]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    known = [peer.name for peer in PEERS]
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no such peer; choose of {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", add_help=False)
    parser.add_argument("--quick", action="store_true", help="one round, one thread, fewer cells")
    parser.add_argument("--peers", type=_names, default=tuple(peer.name for peer in PEERS), metavar="NAME,NAME")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("engine", partial(measure, chosen.peers, QUICK if chosen.quick else Extent()), rest, part=chosen.quick)


if __name__ == "__main__":
    main()
