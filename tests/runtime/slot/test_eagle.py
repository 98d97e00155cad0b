"""A head that drafts from the model's hidden states: over real sockets and models. The text is the one without it; drafts are those of the head over whole texts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from strata_planner.contract.draft_head import DraftHead
from strata_planner.contract.frames import Sampling, Segment, Submit
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.roles import roles_of
from strata_planner.costs.draft_model import draft_page_bytes, draft_weights_bytes
from strata_planner.question.draft_head import head_model
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.loading.load import load_stage
from strata_runtime.model.eagle_head import EagleHead
from strata_runtime.scheduler.draft_round import DraftTask
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.drafter_loading import load_drafter
from strata_runtime.slot.head_guesser import HeadGuesser
from strata_runtime.slot.role_cache import cache_of
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


def eagle(plan: Plan, head: Path, tokens: int = TOKENS) -> Plan:
    return structs.replace(plan, speculation=Speculation("eagle", tokens, draft_uri=str(head)))


@pytest.mark.parametrize("pages", [32, 12])
def test_a_heads_drafts_change_no_text(tiny_llama: Path, head: Path, pages: int) -> None:
    """Greedy, drawn and penalized, in chunks of prompts, with a beginning in common, also in blocks that are too few for all."""
    several = penalized(6, 40, repeats=3)
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(even_plan(tiny_llama, ["s0"])).generate(several)
        leader = pipeline.serve(eagle(even_plan(tiny_llama, ["s0"], pages=pages, micro_batch=(2, 4, 16)), head))
        for _ in range(2):  # the second time blocks of the first are found
            assert leader.generate(several) == expected
        hello = idle(leader)
        assert (hello.preemptions > 0) == (pages == 12)
        assert hello.kv_usage == 0
        assert hello.draft_tokens > 0


class Beside:
    """A stage and its head, driven by hand: what the engine makes of them is tested above."""

    def __init__(self, target: Path, head: Path, pages: int = 32) -> None:
        role = roles_of(eagle(even_plan(target, ["s0"], pages=pages), head))["s0"][0]
        self.model = load_stage(role, target, lambda *_: None, torch.device("cpu"))
        self.drafter: Drafter = load_drafter(role, self.model, lambda: None)
        self._cache = cache_of(role, self.model)

    def compute(self, sequence: int, text: Sequence[int], start: int, blocks: Sequence[int] = ()) -> None:
        """The model's step over these tokens; `blocks`: those that its table does not have yet."""
        batch = self._cache.plan([Segment(sequence, start, len(text), 1, tuple(blocks))])
        self.model.forward(torch.tensor(text), batch)

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


def test_drafts_of_one_token_texts_and_of_parts(tiny_llama: Path, head: Path) -> None:
    """Behind one token there is no state yet; a part of a prompt is taken up without drafts."""
    plain, beside = PlainHead(tiny_llama, head, FUSED), Beside(tiny_llama, head)
    text = a_text(8, 20)
    beside.compute(0, text[:-1], 0, (0, 1))
    parts = [task(0, text[:1], (0, 1), count=0), task(0, text[:11], (0, 1), start=1, count=0)]
    assert [beside.draft(part) for part in parts] == [[[]], [[]]]
    assert beside.draft(task(1, [5], (2,)), task(0, text, (0, 1), start=11)) == [[], plain.chain(text, 6)]


def test_forms_are_kept(tmp_path: Path) -> None:
    """Over a model that knows its language."""
    head = make_head(tmp_path, STRATA_TINY, hidden_size=256, num_key_value_heads=4, draft_vocab_size=600)
    several = held_and_free()
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(STRATA_TINY, ["s0"])
        expected = pipeline.serve(plan).generate(several)
        leader = pipeline.serve(eagle(plan, head))
        assert leader.generate(several) == expected
        assert idle(leader).draft_tokens > 0


def test_a_slot_keeps_its_head_over_epochs_and_lets_go_of_it(tiny_llama: Path, head: Path) -> None:
    several = penalized(4, 20)
    with PipelineHarness(["s0"]) as pipeline:
        plan, held = even_plan(tiny_llama, ["s0"]), []
        expected = pipeline.serve(plan).generate(several)
        for each in (eagle(plan, head), eagle(plan, head), plan):
            assert pipeline.serve(each).generate(several) == expected
            running = pipeline.threads["s0"].slot._running
            assert running is not None
            held.append(running.prepared.loaded[0].drafter)
        assert held[0] is held[1] is not None
        assert held[2] is None


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
    deep = make_head(tmp_path / "deep", tiny_llama, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
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
                pipeline.serve(eagle(even_plan(tiny_llama, ["s0"]), folder))
        assert not loads
        with pytest.raises(RuntimeFaultError, match=r"eagle over 2 stages.*maxStages 1.*mode draft"):
            pipeline.serve(eagle(even_plan(tiny_llama, ["s0", "s1"]), head))


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
