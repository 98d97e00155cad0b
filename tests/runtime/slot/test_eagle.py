"""A head that drafts from the model's hidden states: over real sockets and models. The text is the one without it; drafts are those of the head over whole texts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.draft_head import DraftHead, is_draft_head
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import Abort, Sampling, Segment, Submit
from strata_planner.contract.plan import Plan, Speculation, SpeculationMode
from strata_planner.contract.roles import roles_of
from strata_planner.costs.draft_model import draft_page_bytes, draft_weights_bytes
from strata_planner.question.draft_head import head_model
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.kernels import native_dense, native_rowwise
from strata_runtime.loading.load import load_stage
from strata_runtime.model.eagle_head import EagleHead
from strata_runtime.scheduler.draft_round import Drafted, DraftRound, DraftTask
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.drafter_loading import load_drafter
from strata_runtime.slot.head_guesser import HeadGuesser
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.asked import STRATA_TINY, held_and_free, penalized
from tests.runtime.slot.eagle_heads import DRAFT_VOCABULARY, PlainHead, head_config, make_head
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.test_draft_model import idle

TOKENS = 4
FUSED = (2, 3, 3)  # of `tiny_llama`'s six layers, the usual ones


@pytest.fixture(scope="module")
def head(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("head"), tiny_llama)


def eagle(plan: Plan, head: Path, mode: SpeculationMode = "eagle", tokens: int = TOKENS) -> Plan:
    config = json.loads((head / "config.json").read_text()) if head.exists() else {}
    fused = DraftHead.from_config(config).read_layers(plan.num_layers) if is_draft_head(config) else (0,)
    return structs.replace(plan, speculation=Speculation(mode, tokens, draft_uri=str(head), fused=fused))


@pytest.mark.slow  # its chain below, and the law of all drafts in scheduler/test_engine.py
@pytest.mark.parametrize(
    "case", swept([(stages, pages) for stages in (1, 2, 3) for pages in (32, 12)], [(1, 12)]), ids=str
)
def test_a_heads_drafts_change_no_text(tiny_llama: Path, head: Path, case: tuple[int, int]) -> None:
    """Of so many stages, each with one micro-batch under way: greedy, drawn and penalized, in chunks of prompts, with a beginning in common, also in
    blocks that are too few for all.
    """
    stages, pages = case
    several, names = penalized(6, 40, repeats=3), [f"s{place}" for place in range(stages)]
    with PipelineHarness(names) as pipeline:
        expected = pipeline.serve(even_plan(tiny_llama, names)).generate(several)
        for mode in ("eagle", "auto") if stages == 3 else ("eagle",):
            plan = even_plan(tiny_llama, names, pages=pages, micro_batch=(2, 4, 16))
            leader = pipeline.serve(eagle(plan, head, mode))  # type: ignore[arg-type]
            for _ in range(2):  # the second time blocks of the first are found
                assert leader.generate(several) == expected, mode
            hello = idle(leader)
            assert (hello.preemptions > 0) == (pages == 12)
            assert hello.kv_usage == 0
            assert mode == "auto" or hello.draft_tokens > 0


@pytest.mark.slow  # the test of a chain has them of one stage
@pytest.mark.parametrize(
    "case", swept([(1, ()), (2, ()), (3, ()), (2, (5, 1, 2)), (3, (5, 1, 2))], [(3, (5, 1, 2))]), ids=str
)
def test_drafts_are_those_of_the_head_over_the_whole_text(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[int, tuple[int, ...]]
) -> None:
    """Of so many stages, several micro-batches under way: wherever the layers lie whose inputs are fused, and in whatever order they are named."""
    stages, entered = case
    named = {"eagle_aux_hidden_state_layer_ids": list(entered)} if entered else {}
    folder, names = make_head(tmp_path, tiny_llama, **named), [f"s{place}" for place in range(stages)]
    asked = [greedy(f"r{number}", [*range(9, 40 - number), 77 + number], 16) for number in range(4)]
    drafted: list[tuple[DraftTask, list[int]]] = []
    drafts = Drafter.draft

    def draft(drafter: Drafter, tasks: DraftRound) -> Drafted:
        made = drafts(drafter, tasks)
        drafted.extend(zip(tasks, made.tokens, strict=True))
        return made

    monkeypatch.setattr(Drafter, "draft", draft)
    with PipelineHarness(names) as pipeline:
        plan = eagle(even_plan(tiny_llama, names, micro_batch=(1, 2, 16)), folder)
        answers = pipeline.serve(plan).generate(asked)
    plain = PlainHead(tiny_llama, folder, entered or FUSED)
    texts = [[*each.prompt, *answers[each.request]] for each in asked]
    assert len(drafted) > 40
    for task, tokens in drafted:
        assert tokens == plain.chain(texts[task.sequence][: task.end], len(tokens))


@pytest.mark.slow
def test_a_replay_and_an_abort_in_the_midst_of_others(tiny_llama: Path, head: Path) -> None:
    names, several = ["s0", "s1", "s2"], penalized(6, 30)
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names)
        expected = pipeline.serve(plan).generate(several)
        leader = pipeline.serve(eagle(plan, head))
        for each in several:
            leader.send(each)
        got: dict[str, list[int]] = {each.request: [] for each in several}
        while sum(map(len, got.values())) < 60:
            for event in leader.events():
                got[event.request].append(event.token)
        leader.send(Abort("r0"))
        # Another epoch: what was delivered is known, states of steps under way are not.
        leader = pipeline.serve(eagle(plan, head))
        rest = leader.generate([structs.replace(each, delivered=got[each.request]) for each in several[1:]])
        for each in several[1:]:
            assert got[each.request] + rest[each.request] == expected[each.request]
        assert idle(leader).draft_tokens > 0


class Beside:
    """A stage and its head, driven by hand: what the engine makes of them is tested above."""

    def __init__(self, target: Path, head: Path, pages: int = 32, compute_type: ComputeType = "float32") -> None:
        role = roles_of(eagle(even_plan(target, ["s0"], pages=pages, compute_type=compute_type), head))["s0"][0]
        self.model = load_stage(role, target, lambda *_: None, torch.device("cpu"))
        self.drafter: Drafter = load_drafter(role, self.model, lambda: None)
        self._cache = cache_of(role, self.model)

    def compute(self, sequence: int, text: Sequence[int], start: int, blocks: Sequence[int] = ()) -> None:
        """The model's step over these tokens; `blocks`: those that its table does not have yet."""
        batch = self._cache.plan([Segment(sequence, start, len(text), 1, tuple(blocks))])
        self.model.forward(torch.tensor(text), batch)
        self.drafter.guesser.expect(batch.places)
        self.drafter.guesser.take(self.model.take_states())

    def draft(self, *tasks: DraftTask) -> list[list[int]]:
        return list(self.drafter.draft(tasks).tokens)


def task(sequence: int, text: Sequence[int], blocks: Sequence[int], start: int = 0, count: int = 6) -> DraftTask:
    """Of a text, from a position on."""
    return DraftTask(sequence, start, list(text[start:]), count, tuple(blocks), Sampling(0.0))


def a_text(seed: int, length: int) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"head_dim": 8},
        {"hidden_size": 32, "target_hidden_size": 64},
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
    ],
)
def test_a_chain_is_that_of_the_head_over_the_whole_text(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Texts in chunks, their blocks in no order, several at once."""
    folder = make_head(tmp_path, tiny_llama, seed=3, **changes)
    named = changes.get("eagle_aux_hidden_state_layer_ids")
    plain = PlainHead(tiny_llama, folder, FUSED if named is None else named)  # type: ignore[arg-type]
    beside = Beside(tiny_llama, folder)
    texts, blocks = [a_text(1, 40), a_text(2, 9)], [(7, 2, 9), (4,)]
    beside.compute(0, texts[0][:13], 0, blocks[0])
    beside.compute(1, texts[1][:-1], 0, blocks[1])
    beside.compute(0, texts[0][13:-1], 13)
    drafted = beside.draft(*(task(number, texts[number], blocks[number]) for number in range(2)))
    assert drafted == [plain.chain(text, 6) for text in texts]
    assert all(beside.drafter.guesser.tokens([column])[0] < 128 for column in range(48))


def test_a_head_goes_on_from_the_text_whatever_was_refused_or_shared(tiny_llama: Path, head: Path) -> None:
    """Rows of refused drafts are written over; what others computed of a beginning in common, states included, is not computed again."""
    plain, beside = PlainHead(tiny_llama, head, FUSED), Beside(tiny_llama, head)
    text, blocks = a_text(5, 34), (3, 1, 8)
    beside.compute(0, text[:-1], 0, blocks)
    guesses = beside.draft(task(0, text, blocks, count=4))[0]
    beside.compute(0, [text[-1], *guesses], 33)  # verified: all but the first are refused
    text += [guesses[0], 77]
    assert beside.draft(task(0, text, blocks, start=34, count=6)) == [plain.chain(text, 6)]
    other = text[:32] + a_text(6, 7)
    shared = (3, 1, 5)
    beside.compute(1, other[32:-1], 32, shared)
    assert beside.draft(task(1, other, shared, start=32)) == [plain.chain(other, 6)]
    assert beside.draft(task(0, text, blocks, start=32)) == [plain.chain(text, 6)], "nobody else's entries are touched"


@pytest.mark.skipif(not native_dense.runs(), reason="this processor has no use for it")
def test_what_the_native_library_does_of_rows_makes_the_same_logits(
    tiny_llama: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, but for the last bits."""
    text, blocks, logits = a_text(5, 34), (3, 1, 8), []
    for takes in (native_rowwise.takes, lambda _: False):
        monkeypatch.setattr(native_rowwise, "takes", takes)
        beside = Beside(tiny_llama, head, compute_type="bfloat16")
        beside.compute(0, text[:-1], 0, blocks)
        batch = beside.drafter.cache.plan([Segment(0, 1, 33, 33, blocks)])
        with torch.inference_mode():
            logits.append(beside.drafter.guesser.logits(torch.tensor(text[1:]), batch))
    native, plain = logits
    assert (native - plain).abs().mean() < 0.02 * plain.abs().mean()


def test_drafts_of_one_token_texts_and_of_parts(tiny_llama: Path, head: Path) -> None:
    """Behind one token there is no state yet; a part of a prompt is taken up without drafts."""
    plain, beside = PlainHead(tiny_llama, head, FUSED), Beside(tiny_llama, head)
    text = a_text(8, 20)
    beside.compute(0, text[:-1], 0, (0, 1))
    parts = [task(0, text[:1], (0, 1), count=0), task(0, text[:11], (0, 1), start=1, count=0)]
    assert [beside.draft(part) for part in parts] == [[[]], [[]]]
    assert beside.draft(task(1, [5], (2,)), task(0, text, (0, 1), start=11)) == [[], plain.chain(text, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_forms_are_kept(tmp_path: Path, stages: int) -> None:
    """Over a model that knows its language."""
    head = make_head(tmp_path, STRATA_TINY, hidden_size=256, num_key_value_heads=4, draft_vocab_size=600)
    several, names = held_and_free(), [f"s{place}" for place in range(stages)]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(STRATA_TINY, names)
        expected = pipeline.serve(plan).generate(several)
        leader = pipeline.serve(eagle(plan, head))
        assert leader.generate(several) == expected
        assert idle(leader).draft_tokens > 0


@pytest.mark.slow
def test_slots_keep_a_head_over_epochs_and_let_go_of_it(tiny_llama: Path, head: Path, tmp_path: Path) -> None:
    """The other stages hand on what the new head reads, and nothing when there is none."""
    other = make_head(tmp_path, tiny_llama, seed=1, eagle_aux_hidden_state_layer_ids=[1, 2, 6])
    several, names = penalized(4, 20), ["s0", "s1"]
    with PipelineHarness(names) as pipeline:
        plan, held, models = even_plan(tiny_llama, names), [], set()
        expected = pipeline.serve(plan).generate(several)
        for each in (eagle(plan, head), eagle(plan, head), eagle(plan, other), plan):
            assert pipeline.serve(each).generate(several) == expected
            first, last = (pipeline.threads[name].slot._running for name in names)
            assert first is not None
            assert last is not None
            held.append(first.roles[0].loaded.drafter)
            models.add(last.roles[0].loaded.model)
        assert held[0] is held[1] is not held[2] is not None
        assert held[3] is None
        assert len(models) == 1


def test_a_head_takes_the_bytes_that_plans_count(tiny_llama: Path, head: Path) -> None:
    """But for an embedding of its own, which this one has not."""
    drafter = Beside(tiny_llama, head).drafter
    shapes = head_model(DraftHead.from_config(head_config(tiny_llama)))
    guesser = drafter.guesser
    assert isinstance(guesser, HeadGuesser)
    assert drafter.cache.bytes + guesser.states.nbytes == 32 * draft_page_bytes(shapes, 16, "float32")
    parts = guesser.head
    weights = [*parts.norms, *(each for linear in parts.linears for each in linear.parameters())]
    held = sum(each.nbytes for each in weights)
    assert held + 4 * 4 * DRAFT_VOCABULARY + 4 * 128 * 64 == draft_weights_bytes(shapes, "float32")
    assert parts.targets.nbytes == 8 * DRAFT_VOCABULARY


def test_where_the_head_fails_steps_go_on(
    tiny_llama: Path, head: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    several = penalized(4, 20)
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(even_plan(tiny_llama, ["s0"])).generate(several)
        for kind, fails in ((EagleHead, "fuse"), (HeadGuesser, "further")):
            leader = pipeline.serve(eagle(even_plan(tiny_llama, ["s0"]), head))
            monkeypatch.setattr(kind, fails, lambda *_: 1 / 0)
            assert leader.generate(several) == expected
            assert idle(leader).draft_tokens == 0
            monkeypatch.undo()
            assert "nothing is drafted until the next epoch" in caplog.text
            caplog.clear()


def test_heads_that_do_not_belong_are_refused_before_anything_loads(
    tiny_llama: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    monkeypatch.setattr("strata_runtime.slot.prepare.load_stage", lambda _role, folder, *_, **__: loads.append(folder))
    wide = make_head(tmp_path / "wide", tiny_llama, target_hidden_size=96)
    others = make_head(tmp_path / "others", tiny_llama, vocab_size=200)
    changed = make_head(tmp_path / "changed", tiny_llama, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    plan = eagle(even_plan(tiny_llama, ["s0", "s1"]), changed)
    deep = make_head(tmp_path / "deep", tiny_llama)
    deep_plan = eagle(even_plan(tiny_llama, ["s0"]), deep)
    make_head(deep, tiny_llama, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    cases = {
        wide: "draft model .*wide: it fuses hidden states of 96 values, those of the model that it drafts for have 64.*take",
        others: "it has 200 tokens, the model that it drafts for 128",
        deep: r"fuses the outputs of the layers \[1, 3, 8\].* the layers 0\.\.5",
        tiny_llama: "is that of no EAGLE-3 head",
        tmp_path / "gone": str(tmp_path / "gone"),
    }
    with PipelineHarness(["s0", "s1"]) as pipeline:
        for folder, said in cases.items():
            with pytest.raises(RuntimeFaultError, match=said):
                pipeline.serve(deep_plan if folder == deep else eagle(even_plan(tiny_llama, ["s0"]), folder))
        assert not loads
        make_head(changed, tiny_llama)
        with pytest.raises(RuntimeFaultError, match=r"reads .* \[1, 2\], by the plan .* \[1, 3, 4\]: .*plan again"):
            pipeline.serve(plan)


@pytest.mark.slow
def test_the_shipped_head_drafts_for_its_model() -> None:
    """Text in the words that strata-tiny was trained on: some drafts are right, all are of the head's small vocabulary."""
    prompt = [1, *range(300, 330)]
    asked = [Submit(f"r{number}", [*prompt, number], [], 60, [], Sampling(0.0)) for number in range(4, 8)]
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(STRATA_TINY, ["s0"])
        expected = pipeline.serve(plan).generate(asked)
        leader = pipeline.serve(eagle(plan, STRATA_TINY.with_name("strata-tiny-eagle3")))
        assert leader.generate(asked) == expected
        hello = idle(leader)
        assert hello.accepted_tokens > 0.1 * hello.draft_tokens
