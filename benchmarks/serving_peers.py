"""Ours beside other servers on the same processor, over HTTP on both sides: `python -m benchmarks.serving --peers vllm,llama_cpp`.

HTTP, for llama-server has nothing else and it is what a client meets: ours is `strata up`'s gateway. Every engine has the same checkpoint, one thread for its
model, no processor of its own, as many tokens of KV as our plan gives, and several settings of which the best counts. All are asked in turn, medians of the rounds.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import pipeline, serving_cells
from benchmarks.deployment import Deployment, Wishes, deployed
from benchmarks.peers.environments import NotInstalledError, Peer, python_of
from benchmarks.peers.http_servers import KINDS, Serving, Wish, served_by
from benchmarks.peers.process import PeerError
from benchmarks.rows import Row
from benchmarks.serving_cells import CellError
from benchmarks.serving_load import CHAT_LENGTH, CHAT_TOKENS, CHATS, HELD, POSITIONS, SHARING, TINY, make_model
from benchmarks.truth import write_tokenizer
from strata_planner.contract.store import cache_folder

OURS = "Strata"
DRAFTS = 4
ROUNDS, QUICK_ROUNDS = 3, 1


@dataclass(frozen=True)
class Cell:
    """A load and what its figure is, of a server."""

    name: str
    ask: Callable[[Serving], float]
    unit: str
    lower_is_better: bool

    def best(self, figures: Mapping[str, float]) -> str:
        return (min if self.lower_is_better else max)(figures, key=lambda name: figures[name])


class Load(NamedTuple):
    """Cells that one server of each kind answers."""

    tiny: bool
    wishes: Callable[[Path], Wishes]
    cells: Sequence[Cell]


def _prompts(model: Path) -> Wishes:
    return Wishes(model, POSITIONS, 512, 128, SHARING, "bfloat16", 480_000_000, stages=1)


def _chats(model: Path) -> Wishes:
    return Wishes(model, CHAT_LENGTH, CHAT_TOKENS, 256, CHATS, "bfloat16", 398_000_000, stages=1)


def _tiny(model: Path) -> Wishes:
    return Wishes(model, 512, 120, 128, max(HELD), "bfloat16", stages=1)


def _quoting(model: Path) -> Wishes:
    return Wishes(model, 512, 120, 256, 1, "bfloat16", stages=1, drafts=DRAFTS)


LOADS = (
    Load(
        False,
        _prompts,
        (
            Cell("prefix_ttft", serving_cells.prefix_ttft, "s", True),
            Cell("short_behind_long", serving_cells.short_behind_long, "s", True),
            Cell("stall", serving_cells.stall, "s", True),
        ),
    ),
    Load(False, _chats, (Cell("chat_capacity", serving_cells.chat_capacity, f"of {CHATS} chats", False),)),
    Load(True, _quoting, (Cell("spec_ngram", serving_cells.quoting, "tokens/s", False),)),
    Load(
        True,
        _tiny,
        tuple(
            Cell(f"structured_{streams}", partial(serving_cells.structured, streams), "tokens/s", False)
            for streams in HELD
        ),
    ),
)
CELLS = tuple(cell.name for load in LOADS for cell in load.cells)


@dataclass
class Measured:
    """Figures of one server in one cell, or why there are none."""

    title: str
    cell: str
    setting: str
    figures: list[float] = field(default_factory=list)
    reason: str = ""


def row_name(cell: str, peer: Peer) -> str:
    return f"{cell}_beside_{peer.name}"


def rows_of(measured: Sequence[Measured], peers: Sequence[Peer], cells: Sequence[str]) -> list[Row]:
    """One for each cell and peer: ours, its best setting's, and the ratio. A peer that gave nothing is named with its reason, and the row is not met."""
    rows = []
    for cell in (cell for load in LOADS for cell in load.cells if cell.name in cells):
        found = [each for each in measured if each.cell == cell.name]
        ours = [each for each in found if each.title == OURS]
        own = next((statistics.median(each.figures) for each in ours if each.figures), None)
        for peer in peers:
            theirs = [each for each in found if each.title == peer.title]
            absent = [f"{each.title}: {each.reason}" for each in [*ours, *theirs] if each.reason]
            medians = {each.setting: statistics.median(each.figures) for each in theirs if each.figures}
            rows.append(_row(cell, peer, own, medians, absent))
    return rows


def _row(cell: Cell, peer: Peer, own: float | None, medians: Mapping[str, float], reasons: Sequence[str]) -> Row:
    name = row_name(cell.name, peer)
    if own is None or not medians:
        unit = cell.unit if own is None else f"no peer; ours {own:.4g} {cell.unit}"
        return Row(name, None, unit, reasons[0] if reasons else f"{peer.title}: not measured", goal=1.0)
    setting = cell.best(medians)
    value = medians[setting]
    told = f"{peer.title}, {setting}"
    return Row(name, own, cell.unit, told, value, own / value, 1.0, lower_is_better=cell.lower_is_better)


@dataclass
class Measuring:
    """One run over all loads."""

    folder: Path
    pythons: Mapping[str, Path]
    peers: Sequence[Peer]
    rounds: int
    cells: Sequence[str]
    reasons: dict[str, str] = field(default_factory=dict)
    found: list[Measured] = field(default_factory=list)

    def all(self) -> None:
        for load in LOADS:
            wanted = [cell for cell in load.cells if cell.name in self.cells]
            if wanted:
                self._load(load, wanted)

    def _load(self, load: Load, cells: Sequence[Cell]) -> None:
        model = self._model(tiny=load.tiny)
        with ExitStack() as stack:
            wishes = load.wishes(model)
            place = Path(tempfile.mkdtemp(dir=self.folder))
            deployment = stack.enter_context(deployed(place, wishes))
            servers = [Serving(OURS, "", deployment.port)]
            wish = Wish(model, wishes.max_model_len, pool_tokens(deployment), wishes.concurrency, 1, wishes.drafts)
            _say(f"{', '.join(cell.name for cell in cells)}: {wish.pool_tokens:,} tokens of KV")
            for peer in self.peers:
                servers += self._started(stack, peer, wish, cells)
            for cell in cells:
                self._cell(cell, servers)

    def _model(self, *, tiny: bool) -> Path:
        """A copy of strata-tiny, or the random model: other formats lie beside it."""
        folder = self.folder / ("tiny" if tiny else "model")
        if not folder.exists():
            if tiny:
                folder.mkdir()
                for file in TINY.iterdir():
                    (folder / file.name).symlink_to(file)
            else:
                write_tokenizer(make_model(self.folder), pipeline.SHAPES["vocab_size"])
        return folder

    def _started(self, stack: ExitStack, peer: Peer, wish: Wish, cells: Sequence[Cell]) -> Iterator[Serving]:
        """Its servers, one for each setting; of those that do not start the reason is kept."""
        if peer.name not in self.pythons:
            self.found += [Measured(peer.title, cell.name, "", reason=self.reasons[peer.name]) for cell in cells]
            return
        for setting in KINDS[peer.name].settings(wish):
            try:
                yield stack.enter_context(served_by(peer, self.pythons[peer.name], wish, setting, self.folder))
            except (PeerError, NotInstalledError) as error:
                _say(f"{peer.title}, {setting}: {error}")
                self.found += [Measured(peer.title, cell.name, setting, reason=str(error)) for cell in cells]

    def _cell(self, cell: Cell, servers: Sequence[Serving]) -> None:
        """The first round makes kernels and grammars, and chooses of each server's settings the one that goes on."""
        told = [Measured(each.title, cell.name, each.setting) for each in servers]
        asked = {id(measured): server for measured, server in zip(told, servers, strict=True)}
        tried = {id(each): figure for each in told if (figure := self._figure(cell, each, asked[id(each)])) is not None}
        left = []
        for title in dict.fromkeys(each.title for each in told):
            figures = {each.setting: tried[id(each)] for each in told if each.title == title and id(each) in tried}
            left += [each for each in told if figures and each.title == title and each.setting == cell.best(figures)]
        for _ in range(self.rounds):
            for each in left:
                figure = None if each.reason else self._figure(cell, each, asked[id(each)])
                if figure is not None:
                    each.figures.append(figure)
        self.found += [each for each in told if each in left or each.reason]

    def _figure(self, cell: Cell, told: Measured, server: Serving) -> float | None:
        try:
            figure = cell.ask(server)
        except (CellError, OSError) as error:
            told.reason = str(error)
        else:
            _say(f"  {cell.name}, {told.title} {told.setting}: {figure:.4g} {cell.unit}")
            return figure
        _say(f"  {cell.name}, {told.title} {told.setting}: {told.reason}")
        return None


def pool_tokens(deployment: Deployment) -> int:
    """Tokens whose keys and values our plan has room for."""
    plan = deployment.record.plan
    (stage,) = plan.replicas[0].stages
    return stage.kv_page_budget * plan.page_tokens


def measure(peers: Sequence[Peer], rounds: int, cells: Sequence[str] = CELLS) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        measuring = Measuring(Path(name), {}, peers, rounds, cells)
        found: dict[str, Path] = {}
        for peer in peers:
            try:
                found[peer.name] = python_of(peer, cache_folder() / "peers")
            except NotInstalledError as error:
                measuring.reasons[peer.name] = f"not installed: {error}"
        measuring.pythons = found
        measuring.all()
    Console(width=150).print(table(measuring.found))
    return rows_of(measuring.found, peers, cells)


def table(found: Sequence[Measured]) -> Table:
    shown = Table(title="every server and setting", title_justify="left")
    for column in ("cell", "server", "setting", "median", "least", "most", "without"):
        shown.add_column(column, justify="right" if column in {"median", "least", "most"} else "left")
    for each in found:
        some = each.figures
        figures = [f"{figure:,.4g}" for figure in (statistics.median(some), min(some), max(some))] if some else [""] * 3
        shown.add_row(each.cell, each.title, each.setting, *figures, each.reason)
    return shown


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
