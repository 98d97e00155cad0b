"""Our engine on one GPU beside transformers on the same GPU. `python -m benchmarks.gpu_engine [--json FILE] [--device cpu] [--bits 16,8] [--keep FOLDER]`.

A random model of four layers of an 8B Llama. Ours is a slot in a process of its own under a plan, at 16, 8 and 4 bits; the peer are forward passes of transformers with its own
cache, at 16 bits: as they are, and as one recorded CUDA graph a token over a cache of fixed length, which is the fastest that it has for decoding. Engines take turns; medians.
Beside them stands what memory alone would take: the bytes of all weights over a measured copy's rate. Without a GPU all rows are empty.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.engine_contenders import Cell, Ours, bytes_a_token, described
from benchmarks.peers.served import Moments, prompts_of, timed_steps
from benchmarks.rows import Row, run
from benchmarks.self_drafts import own_cache
from benchmarks.slots import served
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_runtime.model.random_model import make_random_model
from strata_runtime.tools.quantize.__main__ import main as quantize

SHAPES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    **SHAPES,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
SIZES = {"decode_1": Cell(1, 128, 128), "decode_16": Cell(16, 128, 96), "prefill_2048": Cell(1, 2048, 1)}
BITS = (16, 8, 4)
EIGHT = 8  # fewer are served from an any-precision copy
ROUNDS = 3
LONGEST = 2304
COPIED_BYTES = 2 << 30
PEER = "transformers, 16 bits"
NO_GPU = "no CUDA device here"


def plan(model: Path, cell: Cell, bits: int, device: str) -> Plan:
    """One stage on one device."""
    kind = Device(type="cpu", memory_bytes=4 << 30, threads=1) if device == "cpu" else Device(type="H100-80GB")
    request = PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes=(Node(name="n0", devices=(kind,)),)),
        workload=Workload(cell.prompt, cell.answer, cell.sequences),
        max_model_len=LONGEST,
        allowed_bits=(bits,),
        max_stages=1,
        method="anyPrecision" if bits < EIGHT else "roundToNearest",
    )
    return make_plan(request).plan


class Transformers:
    """Its forward passes with greedy tokens; one setting."""

    def __init__(self, model: Any, device: str, *, graph: bool) -> None:
        self.title = f"{PEER}, {'a graph a token' if graph else 'as it is'}"
        self._model, self._device, self._graph = model, device, graph

    @torch.inference_mode()
    def rate(self, cell: Cell) -> float:
        prompts = torch.tensor(prompts_of(cell.sequences, cell.prompt), device=self._device)
        moments = self._recorded(prompts, cell) if self._graph else self._plain(prompts, cell.answer)
        return cell.rate(*moments)

    def _plain(self, prompts: torch.Tensor, answer: int) -> Moments:
        cache, tokens = DynamicCache(config=self._model.config), prompts

        def step() -> None:
            nonlocal tokens
            logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1:].argmax(-1)
            tokens.cpu()  # somebody gets it

        return timed_steps(step, step, answer)

    def _recorded(self, prompts: torch.Tensor, cell: Cell) -> Moments:
        """The graph is recorded outside what is timed."""
        cache = StaticCache(config=self._model.config, max_cache_len=cell.prompt + cell.answer)
        tokens = torch.zeros(cell.sequences, 1, dtype=torch.int64, device=self._device)
        place = torch.tensor([[cell.prompt]], device=self._device)

        def forward(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            logits = self._model(
                given, past_key_values=cache, position_ids=places, use_cache=True, logits_to_keep=1
            ).logits
            likely: torch.Tensor = logits[:, -1:].argmax(-1)
            return likely

        beginning = torch.arange(cell.prompt, device=self._device)[None]
        forward(prompts, beginning)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):
                forward(tokens, place)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens.copy_(forward(tokens, place))
            place.add_(1)
        cache.reset()
        place.fill_(cell.prompt)

        def first() -> None:
            tokens.copy_(forward(prompts, beginning))
            tokens.cpu()

        def step() -> None:
            graph.replay()
            tokens.cpu()

        return timed_steps(first, step, cell.answer)


def copied_bytes_per_second(device: str) -> float:
    """Read and written, of one large copy: the best of some."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times: list[float] = []
    new_event: Any = torch.cuda.Event
    for _ in range(10):
        start, stop = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * COPIED_BYTES / min(times)


def make_model(folder: Path, device: str, wanted: Sequence[int]) -> Path:
    """Made where it is not yet, with the any-precision copy where one is served."""
    if not (folder / "config.json").exists():
        make_random_model(folder, "llama", dtype=torch.bfloat16, **(SHAPES if device == "cuda" else TINY))
    if any(bits < EIGHT for bits in wanted):
        quantize([str(folder), "--bits", "4", "--device", device, "--threads", "4"])
    return folder


def measure(device: str, wanted: Sequence[int], keep: Path | None) -> list[Row]:
    if device == "cuda" and not torch.cuda.is_available():
        return [Row(f"gpu_{name}_{bits}", None, NO_GPU, PEER) for name in SIZES for bits in wanted]
    found: list[tuple[str, str, list[float]]] = []
    bounds: dict[int, float] = {}
    stream = copied_bytes_per_second(device) if device == "cuda" else 0.0
    with tempfile.TemporaryDirectory() as name, own_cache(Path(name) / "cache"):
        folder = make_model(keep or Path(name) / "model", device, wanted)
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        for cell_name, cell in SIZES.items():
            with ExitStack() as stack:
                theirs = [Transformers(whole, device, graph=False)]
                if device == "cuda" and cell.answer > 1:
                    theirs.append(Transformers(whole, device, graph=True))
                contenders: list[tuple[str, Callable[[Cell], float]]] = [(each.title, each.rate) for each in theirs]
                for bits in wanted:
                    chosen = plan(folder, cell, bits, device)
                    bounds[bits] = bytes_a_token(folder, chosen)
                    contenders.append((f"{bits} bits", Ours(stack.enter_context(served(chosen, threads=4))).rate))
                    print(f"{cell_name}: {described(chosen)} is served", flush=True)
                rates: dict[str, list[float]] = {title: [] for title, _ in contenders}
                for _ in range(ROUNDS + 1):  # the first makes kernels
                    for title, rate in [each for each in contenders if each[0] in rates]:
                        try:
                            rates[title].append(rate(cell))
                        except RuntimeError as error:  # a model that cannot be recorded, say: the other setting stays
                            del rates[title]
                            print(f"without {title} in {cell_name}: {error}", flush=True)
                found += [(cell_name, title, each[1:]) for title, each in rates.items()]
                print(
                    cell_name,
                    {title: f"{statistics.median(each[1:]):.1f}" for title, each in rates.items()},
                    flush=True,
                )
    Console(width=150).print(_table(found, bounds, stream))
    return _rows(found, wanted)


def _table(found: Sequence[tuple[str, str, list[float]]], bounds: dict[int, float], stream: float) -> Table:
    table = Table(title=f"tokens/s; memory copied at {stream / 1e9:,.0f} GB/s", title_justify="left")
    for column in ("cell", "engine", "median", "least", "most", "of what memory alone gives"):
        table.add_column(column, justify="right" if column in {"median", "least", "most"} else "left")
    for cell, title, rates in found:
        bits = int(title.split()[0]) if title[0].isdigit() else 16
        share = statistics.median(rates) * bounds[bits] / stream if cell == "decode_1" and stream else None
        figures = (f"{rate:,.1f}" for rate in (statistics.median(rates), min(rates), max(rates)))
        table.add_row(cell, title, *figures, "" if share is None else f"{share:.2f}")
    return table


def _rows(found: Sequence[tuple[str, str, list[float]]], wanted: Sequence[int]) -> list[Row]:
    medians = {(cell, title): statistics.median(rates) for cell, title, rates in found}
    rows = []
    for cell in SIZES:
        peer = max(rate for (name, title), rate in medians.items() if name == cell and title.startswith(PEER))
        for bits in wanted:
            own = medians[cell, f"{bits} bits"]
            rows.append(Row(f"gpu_{cell}_{bits}", own, "tokens/s", PEER, peer, own / peer))
    return rows


def _bits(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", add_help=False)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model, to try this program"
    )
    parser.add_argument("--bits", type=_bits, default=BITS, help="16,8,4 or some of them")
    parser.add_argument("--keep", type=Path, help="the model's folder: made once, and used again the next time")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("gpu_engine", partial(measure, chosen.device, chosen.bits, chosen.keep), rest)


if __name__ == "__main__":
    main()
