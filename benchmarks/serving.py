"""What the engine makes of requests that meet: prefixes in common, chats without an end, a small prompt behind a large one, streams beside a prompt.

`python -m benchmarks.serving [--json FILE]`; `--peers vllm,llama_cpp [--quick] [--cells stall,spec_ngram]` instead: ours beside other servers
(`benchmarks.serving_peers`). A random-weight model of 110 million parameters (`benchmarks.pipeline`'s with 4 layers) on slots of one
thread and one core each, over one stage and over two, asked at the leader's port. Each row is a ratio within one run; nothing of an earlier request is found but where
the row is about that.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from msgspec import structs
from transformers import AutoTokenizer

from benchmarks import pipeline, serving_peers
from benchmarks.peers.environments import SERVERS, Peer
from benchmarks.rows import Row, run
from benchmarks.serving_load import (
    BESIDE,
    CHAT_LENGTH,
    CHAT_TOKENS,
    CHATS,
    HELD,
    LARGE,
    POOL_TOKENS,
    POSITIONS,
    PREFIX,
    SCHEMA,
    SHARING,
    SMALL,
    STREAMS,
    TINY,
    answer_tokens,
    make_model,
    passage,
    prompt_of,
)
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.control import GetStatus
from strata_planner.contract.draft_head import DraftHead
from strata_planner.contract.frames import Abort, Grammar, LogitRules, Sampling, Submit
from strata_planner.contract.plan import NO_SPECULATION, Plan, Speculation, SpeculationMode
from strata_planner.question.workload import Workload
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

LARGE_STEPS, RUNS = 6, 3
STEPS_BEFORE = 500  # of streams, before a prompt comes
DRAFTING = (1, 4, 16, 64)
HEAD_TOKENS = 2
ASKED_ABOUT = ("textwrap.dedent", "os.path.join", "json.dumps", "shutil.copytree", "heapq.heappush", "random.shuffle")
FORM = Grammar("json_schema", SCHEMA, (3,))  # strata-tiny's end of text
HEAD = TINY.with_name("strata-tiny-eagle3")


def plan(model: Path, stages: int, workload: Workload, max_model_len: int) -> Plan:
    """With a pool of POOL_TOKENS at least."""
    made = pipeline.plan(model, stages, workload, max_model_len)
    (replica,) = made.replicas
    pages = -(-max(POOL_TOKENS, max_model_len) // made.page_tokens)
    cut = tuple(structs.replace(stage, kv_page_budget=pages) for stage in replica.stages)
    return structs.replace(made, replicas=(structs.replace(replica, stages=cut),))


@dataclass
class Heard:
    """When each token of each request came, in seconds."""

    moments: dict[str, list[float]] = field(default_factory=dict)

    def first(self, request: str) -> float:
        return self.moments[request][0]

    def gaps(self, request: str, begin: float, end: float) -> list[float]:
        """Between neighbouring tokens of which the later came within these moments."""
        came = self.moments[request]
        return [later - one for one, later in itertools.pairwise(came) if begin <= later <= end]


class Asked:
    """A plan in force, and what its leader says."""

    def __init__(self, leader: LeaderClient, slots: Sequence[SlotProcess]) -> None:
        self.leader = leader
        self._slots = slots
        self._run = 0

    def names(self, what: str, count: int) -> list[str]:
        self._run += 1
        return [f"{what} {self._run}-{number}" for number in range(count)]

    def send(self, submits: Iterable[Submit]) -> float:
        """When they were sent."""
        for submit in submits:
            self.leader.send(submit)
        return time.perf_counter()

    def listen(self, heard: Heard, until: Callable[[], bool]) -> None:
        while not until():
            events = self.leader.events()
            now = time.perf_counter()
            for event in events:
                heard.moments.setdefault(event.request, []).append(now)

    def end(self, names: Iterable[str]) -> None:
        """No request is left when this returns."""
        for name in names:
            self.leader.send(Abort(name))
        while (hello := self.leader.hello()).running + hello.waiting:
            time.sleep(0.01)

    @property
    def steps(self) -> int:
        return self._slots[0].ask(GetStatus()).roles[0].steps


def measure_prefix(asked: Asked) -> tuple[float, float]:
    """Mean seconds to the first token, of requests that come together: with the prefix in common, and each computing its own."""

    def mean(*, sharing: bool) -> float:
        names = asked.names("prefix", SHARING)
        submits = [
            greedy(name, [*prompt_of(PREFIX), *prompt_of(16, seed)], 1, salt=names[0] if sharing else name)
            for seed, name in enumerate(names)
        ]
        heard = Heard()
        sent = asked.send(submits)
        asked.listen(heard, lambda: len(heard.moments) == len(names))
        return statistics.mean(heard.first(name) - sent for name in names)

    return mean(sharing=True), mean(sharing=False)


def measure_chats(asked: Asked) -> int:
    """Short chats that say no max_tokens, at once: how many run when the last that is admitted has its first token."""
    names = asked.names("chat", CHATS)
    heard = Heard()
    left = CHAT_LENGTH - CHAT_TOKENS
    asked.send(greedy(name, prompt_of(CHAT_TOKENS, seed), left, salt=name) for seed, name in enumerate(names))
    asked.listen(heard, lambda: sum(map(len, heard.moments.values())) >= 2 * CHATS)
    running = asked.leader.hello().running
    asked.end(names)
    return running


def measure_small(asked: Asked) -> tuple[float, float, float]:
    """First token of a small prompt on an idle pipeline and behind a large one, seconds, and seconds of a step meanwhile."""

    def first(name: str) -> float:
        heard = Heard()
        sent = asked.send([greedy(name, prompt_of(SMALL, 7), 1, salt=name)])
        asked.listen(heard, lambda: name in heard.moments)
        return heard.first(name) - sent

    alone, behind = asked.names("small", 2)
    first(asked.names("warm", 1)[0])
    idle = first(alone)
    (large,) = asked.names("large", 1)
    asked.send([greedy(large, prompt_of(LARGE), 1, salt=large)])
    before, began = asked.steps, time.perf_counter()
    while asked.steps < before + LARGE_STEPS:
        time.sleep(0.001)
    step = (time.perf_counter() - began) / LARGE_STEPS
    seconds = first(behind)
    asked.end([large])
    return idle, seconds, step


def measure_stall(asked: Asked) -> tuple[float, float, float]:
    """The longest gap of running streams from when a prompt comes until its first token; the median gap before, and the longest of as many there: what the
    machine does by itself. Seconds.
    """
    streams = asked.names("stream", STREAMS)
    heard = Heard()
    asked.send(greedy(name, prompt_of(64, seed), 2000, salt=name) for seed, name in enumerate(streams))
    asked.listen(heard, lambda: min(len(heard.moments.get(name, ())) for name in streams) >= STEPS_BEFORE)
    (large,) = asked.names("beside", 1)
    sent = asked.send([greedy(large, prompt_of(BESIDE), 1, salt=large)])
    asked.listen(heard, lambda: large in heard.moments)
    asked.end(streams)
    before, during = (
        [heard.gaps(name, *between) for name in streams] for between in ((0.0, sent), (sent, heard.first(large)))
    )
    alike = (one[-len(other) :] for one, other in zip(before, during, strict=True))
    return max(map(max, during)), statistics.median(itertools.chain(*before)), max(map(max, alike))


def measure_stages(model: Path, stages: int) -> list[Row]:
    """All rows of a pipeline of so many stages."""
    mark = "" if stages == 1 else f"_{stages}_stages"
    wanted = plan(model, stages, Workload(512, 128, 16), POSITIONS)
    with slot_processes(wanted) as slots:
        client = PipelineClient(slots)
        asked = Asked(client.serve(wanted), list(slots.values()))
        measure_stall(asked)  # kernels are made for numbers of rows as they first come
        measure_prefix(asked)
        shared, apart = _medians(lambda: measure_prefix(asked))
        idle, behind, step = _medians(lambda: measure_small(asked))
        longest, median, by_itself = _medians(lambda: measure_stall(asked))
        chats = plan(model, stages, Workload(CHAT_TOKENS, 256, CHATS), CHAT_LENGTH)
        running = measure_chats(Asked(client.serve(chats), list(slots.values())))
    return [
        _under(f"prefix_ttft{mark}", shared, f"s, {SHARING} over {PREFIX} tokens", "none shared", apart, 0.15),
        Row(f"chat_capacity{mark}", running, f"of {CHATS} in {POOL_TOKENS:,} tokens", goal=CHATS),
        Row(
            f"short_behind_long{mark}",
            behind,
            f"s, {SMALL} behind {LARGE:,} tokens",
            "idle pipeline; ratio: steps more",
            idle,
            (behind - idle) / step,
            goal=3,
            lower_is_better=True,
        ),
        _under(f"stall{mark}", longest, f"s, {BESIDE:,} tokens come", "median step", median, 2),
        Row(f"stall_by_itself{mark}", by_itself, "s, no prompt comes", "median step", median, by_itself / median),
    ]


def measure_drafts(stages: int) -> list[Row]:
    """strata-tiny: answers that repeat what was asked, drafted from their own text, and drawn text at temperature 1 that nobody can guess."""
    mark = "" if stages == 1 else f"_{stages}_stages"
    wanted = plan(TINY, stages, Workload(96, 128, DRAFTING[-1]), 512)
    rows: list[Row] = []
    with slot_processes(wanted) as slots:
        client = PipelineClient(slots)

        def rate(mode: SpeculationMode, streams: int, *, drawn: bool) -> float:
            asked = Asked(client.serve(structs.replace(wanted, speculation=Speculation(mode, 4))), list(slots.values()))
            _tokens_per_second(asked, streams, drawn=drawn)  # kernels, and what `auto` learns
            return _tokens_per_second(asked, streams, drawn=drawn)

        value, peer = pipeline.alternate(
            partial(rate, "ngram", 1, drawn=False), partial(rate, "none", 1, drawn=False), RUNS
        )
        rows.append(Row(f"spec_ngram{mark}", value, "tokens/s, greedy", "none", peer, value / peer, 2.0))
        for streams in DRAFTING:
            pair = pipeline.alternate(
                partial(rate, "auto", streams, drawn=True), partial(rate, "none", streams, drawn=True), RUNS
            )
            rows.append(
                Row(
                    f"spec_never_worse_{streams}{mark}",
                    pair[0],
                    f"tokens/s, {streams} drawn",
                    "none",
                    pair[1],
                    pair[0] / pair[1],
                    0.97,
                )
            )
    return rows


def measure_head(stages: int) -> list[Row]:
    """strata-tiny with its EAGLE-3 head: greedy answers to questions about Python, one after the other."""
    mark = "" if stages == 1 else f"_{stages}_stages"
    wanted = plan(TINY, stages, Workload(32, 64, 1), 256)
    fused = DraftHead.from_config(json.loads((HEAD / "config.json").read_text())).read_layers(wanted.num_layers)
    wish = Speculation("eagle", HEAD_TOKENS, draft_uri=str(HEAD), fused=fused)
    per_step: list[float] = []
    with slot_processes(wanted) as slots:
        client = PipelineClient(slots)

        def rate(speculation: Speculation) -> float:
            asked = Asked(client.serve(structs.replace(wanted, speculation=speculation)), list(slots.values()))
            _answers_per_second(asked)  # kernels
            before, measured = asked.leader.hello(), _answers_per_second(asked)
            after = asked.leader.hello()
            if verified := after.drafts - before.drafts:
                per_step.append(1 + (after.accepted_tokens - before.accepted_tokens) / verified)
            return measured

        value, peer = pipeline.alternate(partial(rate, wish), partial(rate, NO_SPECULATION), RUNS)
    unit = f"tokens/s, {statistics.median(per_step):.2f} tokens a verification of {HEAD_TOKENS}"
    return [Row(f"spec_eagle{mark}", value, unit, "none", peer, value / peer, 1.2)]


def _answers_per_second(asked: Asked) -> float:
    """Tokens a second."""
    prompts = _questions()
    submits = [
        Submit(name, prompt, [], 64, [3], Sampling(0.0), salt=name)
        for name, prompt in zip(asked.names("questions", len(prompts)), prompts, strict=True)
    ]
    started, tokens = time.perf_counter(), 0
    for submit in submits:
        tokens += len(asked.leader.generate([submit])[submit.request])
    return tokens / (time.perf_counter() - started)


@cache
def _questions() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What does {name} do?"}], add_generation_prompt=True, return_dict=False
        )
        for name in ASKED_ABOUT
    ]


def measure_structured(stages: int) -> list[Row]:
    """strata-tiny: greedy answers that are held to a JSON schema, and free ones."""
    mark = "" if stages == 1 else f"_{stages}_stages"
    wanted = plan(TINY, stages, Workload(96, 128, max(HELD)), 512)
    rows: list[Row] = []
    with slot_processes(wanted) as slots:
        client = PipelineClient(slots)
        asked = Asked(client.serve(wanted), list(slots.values()))
        for streams in HELD:
            held, free = (
                partial(_tokens_per_second, asked, streams, drawn=False, rules=rules)
                for rules in (LogitRules(grammar=FORM), None)
            )
            for rate in (held, free):
                rate()  # kernels, and the grammar
            value, peer = pipeline.alternate(held, free, RUNS)
            name = f"structured_{streams}{mark}"
            rows.append(Row(name, value, f"tokens/s, {streams} of a schema", "free", peer, value / peer, 0.9))
    return rows


def _tokens_per_second(asked: Asked, streams: int, *, drawn: bool, rules: LogitRules | None = None) -> float:
    names = asked.names("drafts", streams)
    answer = answer_tokens(streams)
    sampling = Sampling(1.0 if drawn else 0.0, rules=rules)
    submits = [
        Submit(name, passage(seed, drawn=drawn), [], answer, [], structs.replace(sampling, seed=seed), salt=name)
        for seed, name in enumerate(names)
    ]
    started = time.perf_counter()
    asked.leader.generate(submits)
    return streams * answer / (time.perf_counter() - started)


def _under(name: str, value: float, unit: str, peer: str, peer_value: float, goal: float) -> Row:
    return Row(name, value, unit, peer, peer_value, value / peer_value, goal, lower_is_better=True)


def _medians(measured: Callable[[], Sequence[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*(measured() for _ in range(RUNS)), strict=True)]


def measure(stages: Sequence[int] = (1, 2)) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        rows = [row for count in stages for row in measure_stages(model, count)]
    for small in (measure_drafts, measure_head, measure_structured):
        rows += [row for count in stages for row in small(count)]
    return rows


def _peers(text: str) -> tuple[Peer, ...]:
    known = {peer.name: peer for peer in SERVERS}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such server; choose of {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def _cells(text: str) -> tuple[str, ...]:
    if unknown := [name for name in text.split(",") if name not in serving_peers.CELLS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: no such cell; choose of {', '.join(serving_peers.CELLS)}"
        )
    return tuple(text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", add_help=False)
    parser.add_argument("--peers", type=_peers, default=(), metavar="NAME,NAME")
    parser.add_argument("--cells", type=_cells, default=serving_peers.CELLS, metavar="NAME,NAME")
    parser.add_argument(
        "--quick", action="store_true", help="beside peers: one round after the one that chooses settings"
    )
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if not chosen.peers:
        run("serving", measure, rest)
        return
    rounds = serving_peers.QUICK_ROUNDS if chosen.quick else serving_peers.ROUNDS
    run("serving", partial(serving_peers.measure, chosen.peers, rounds, chosen.cells), rest, part=True)


if __name__ == "__main__":
    main()
