"""A small model that drafts beside the leader: over real sockets and models. The text is the one without it; how much of it is drafted is counted."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from strata_planner.contract.frames import Abort, LeaderHello, LogitRules, Sampling, Submit
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.costs.draft_model import draft_page_bytes, draft_weights_bytes
from strata_planner.question.model import Model
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.model.random_model import make_random_model
from strata_runtime.slot.drafter import Drafter, SmallModel
from strata_runtime.wire.client import LeaderClient, greedy
from tests.laws import swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.asked import STRATA_TINY, held_and_free, penalized
from tests.runtime.slot.harness import PipelineHarness

TOKENS = 4
SHAPES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with the tokens of `shallow_llama`."""
    return make_random_model(tmp_path_factory.mktemp("small"), "llama", vocab_size=128, num_hidden_layers=2, **SHAPES)


def drafting(plan: Plan, model: Path, mode: str = "draft") -> Plan:
    return structs.replace(plan, speculation=Speculation(mode, TOKENS, draft_uri=str(model)))  # type: ignore[arg-type]


def asked(count: int = 6, answer: int = 40) -> list[Submit]:
    return penalized(count, answer, repeats=3)


def idle(leader: LeaderClient) -> LeaderHello:
    """Told by another thread than the one that steps."""
    while (hello := leader.hello()).running:
        pass
    return hello


@pytest.mark.slow  # the test of a model that drafts for itself has right drafts, the one of what was refused wrong ones
@pytest.mark.parametrize("case", swept([(1, 32), (1, 12), (3, 32), (3, 12)], [(1, 12)]), ids=str)
def test_a_small_models_drafts_change_no_text(shallow_llama: Path, small: Path, case: tuple[int, int]) -> None:
    """Of so many stages; also in blocks that are too few for all."""
    stages, pages = case
    names = [f"s{place}" for place in range(stages)]
    with PipelineHarness(names) as pipeline:
        expected = pipeline.serve(even_plan(shallow_llama, names)).generate(asked())
        plan = even_plan(shallow_llama, names, pages=pages)
        for mode in ("draft", "auto"):
            leader = pipeline.serve(drafting(plan, small, mode))
            assert leader.generate(asked()) == expected, mode
            hello = idle(leader)
            assert (hello.preemptions > 0) == (pages == 12)
            assert hello.kv_usage == 0
            assert mode == "auto" or 0 < hello.accepted_tokens < hello.draft_tokens


@pytest.mark.parametrize("case", swept([(1, 0.0), (1, 0.9), (3, 0.0), (3, 0.9)], [(3, 0.9)]), ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(shallow_llama: Path, case: tuple[int, float]) -> None:
    """In fp32, greedy and drawn: keys, values and positions of its own pool are those of the text, and draws are those of the verification."""
    stages, temperature = case
    names = [f"s{place}" for place in range(stages)]
    several = [
        Submit(f"r{number}", [*range(9, 40), number], [], 41, [], Sampling(temperature, top_k=5, seed=number))
        for number in range(3)
    ]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(shallow_llama, names)
        expected = pipeline.serve(plan).generate(several)
        leader = pipeline.serve(drafting(plan, shallow_llama))
        assert leader.generate(several) == expected
        hello = idle(leader)
        assert hello.accepted_tokens == hello.draft_tokens
        assert hello.draft_tokens >= 3 * 40 * TOKENS / (TOKENS + 1) - 3 * TOKENS
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        drafter = running.roles[0].loaded.drafter
        assert drafter is not None
        assert drafter.guesser.layers_begun > 0, "a leader that drafts for long is seen to get on"


def test_what_was_refused_is_not_gone_on_from(shallow_llama: Path) -> None:
    """A penalty that only the verification knows refuses drafts; the next ones follow from the text again: as many are right as each time before."""
    bias = LogitRules(bias=((7, 100.0),), min_tokens=0)
    one = Submit("r0", [*range(9, 40)], [], 20, [], Sampling(0.0, rules=bias))
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(drafting(even_plan(shallow_llama, ["s0"]), shallow_llama))
        assert leader.generate([one]) == {"r0": [7] * 20}
        assert idle(leader).accepted_tokens == 0
        plain = greedy("r1", [*range(9, 40)] + [7] * 20, 41)
        before = idle(leader)
        expected = leader.generate([plain])["r1"]
        after = idle(leader)
        assert len(expected) == 41
        accepted, drafted = (
            after.accepted_tokens - before.accepted_tokens,
            after.draft_tokens - before.draft_tokens,
        )
        assert accepted == drafted == 40 * TOKENS / (TOKENS + 1)


@pytest.mark.slow
def test_a_replay_and_an_abort_in_the_midst_of_others(shallow_llama: Path, small: Path) -> None:
    with PipelineHarness(["s0", "s1"]) as pipeline:
        plan = even_plan(shallow_llama, ["s0", "s1"])
        expected = pipeline.serve(plan).generate(asked())
        leader = pipeline.serve(drafting(plan, small))
        for each in asked():
            leader.send(each)
        got: dict[str, list[int]] = {f"r{number}": [] for number in range(6)}
        while sum(map(len, got.values())) < 60:
            for event in leader.events():
                got[event.request].append(event.token)
        leader.send(Abort("r0"))
        leader = pipeline.serve(drafting(plan, small))  # another epoch: what was delivered is known
        rest = leader.generate([structs.replace(each, delivered=got[each.request]) for each in asked()[1:]])
        for each in asked()[1:]:
            assert got[each.request] + rest[each.request] == expected[each.request]


@pytest.mark.slow
def test_where_the_small_model_fails_steps_go_on(
    shallow_llama: Path, small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its guesses are lost, and nothing else."""
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(shallow_llama, ["s0"])
        expected = pipeline.serve(plan).generate(asked())
        leader = pipeline.serve(drafting(plan, small))
        monkeypatch.setattr(Drafter, "_drawn", lambda *_: 1 / 0)
        assert leader.generate(asked()) == expected
        assert idle(leader).draft_tokens == 0
        monkeypatch.undo()
        assert "nothing is drafted until the next epoch" in caplog.text
        leader = pipeline.serve(drafting(plan, small))
        assert leader.generate(asked()) == expected
        assert idle(leader).draft_tokens > 0


@pytest.mark.slow
def test_forms_are_kept(tmp_path: Path) -> None:
    """Over a model that knows its language, drafting for itself without the grammar."""
    plan = even_plan(STRATA_TINY, ["s0"])
    several = held_and_free()
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(several)
        leader = pipeline.serve(drafting(plan, STRATA_TINY))
        assert leader.generate(several) == expected
        assert idle(leader).accepted_tokens > 0


def test_a_slot_keeps_its_drafter_over_epochs_and_lets_go_of_it(shallow_llama: Path, small: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(shallow_llama, ["s0"])
        held = []
        for each in (drafting(plan, small), drafting(plan, small), plan):
            pipeline.serve(each)
            running = pipeline.threads["s0"].slot._running
            assert running is not None
            held.append(running.roles[0].loaded.drafter)
        assert held[0] is held[1] is not None
        assert held[2] is None


def test_a_small_model_takes_the_bytes_that_plans_count(shallow_llama: Path, small: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(drafting(even_plan(shallow_llama, ["s0"]), small))
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        drafter, shapes = running.roles[0].loaded.drafter, Model.from_folder(small)
        assert drafter is not None
        assert drafter.cache.bytes == 32 * draft_page_bytes(shapes, 16, "float32")
        assert isinstance(drafter.guesser, SmallModel)
        module = drafter.guesser.model._stage.module
        held = {tensor.data_ptr(): tensor.nbytes for tensor in module.parameters()}
        assert sum(held.values()) == draft_weights_bytes(shapes, "float32")


def with_tokens(folder: Path, model: Path, tokens: dict[str, int]) -> Path:
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": tokens, "merges": []}}))
    return folder


def test_who_means_something_else_by_a_token_is_refused(shallow_llama: Path, small: Path, tmp_path: Path) -> None:
    target = with_tokens(tmp_path / "target", shallow_llama, {"a": 0, "b": 1, "c": 2})
    alike = with_tokens(tmp_path / "alike", small, {"a": 0, "b": 1})
    other = with_tokens(tmp_path / "other", small, {"a": 0, "c": 1, "b": 2})
    larger = make_random_model(tmp_path / "larger", "llama", vocab_size=160, num_hidden_layers=1, **SHAPES)
    odd = with_tokens(tmp_path / "odd", small, {"a": 0, "b": 1})
    (odd / "config.json").write_text(json.dumps({"model_type": "no-such-model", "vocab_size": 128}))
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(target, ["s0"])
        pipeline.serve(drafting(plan, alike))
        with pytest.raises(RuntimeFaultError, match=r"draft model .*odd: .*no-such-model"):
            pipeline.serve(drafting(plan, odd))
        with pytest.raises(
            RuntimeFaultError,
            match=r"other: token 1 is 'c', for the model that it drafts for 'b', and 1 more differ.*family",
        ):
            pipeline.serve(drafting(plan, other))
        with pytest.raises(RuntimeFaultError, match="it has 160 tokens, the model that it drafts for 128"):
            pipeline.serve(drafting(plan, larger))
        with pytest.raises(RuntimeFaultError, match=str(tmp_path / "gone")):
            pipeline.serve(drafting(plan, tmp_path / "gone"))


@pytest.mark.slow
def test_tables_of_unlike_padding_draft_for_each_other(shallow_llama: Path, tmp_path: Path) -> None:
    """The tokenizers agree; no token is drafted that the target does not have."""
    tokens = {f"t{number}": number for number in range(100)}
    target = with_tokens(tmp_path / "target", shallow_llama, tokens)
    larger = make_random_model(tmp_path / "larger", "llama", vocab_size=160, num_hidden_layers=1, **SHAPES)
    fewer = make_random_model(tmp_path / "fewer", "llama", vocab_size=100, num_hidden_layers=1, **SHAPES)
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(target, ["s0"])
        expected = pipeline.serve(plan).generate(asked())
        for number, model in enumerate((larger, fewer)):
            draft = with_tokens(tmp_path / f"draft{number}", model, tokens)
            leader = pipeline.serve(drafting(plan, draft))
            assert leader.generate(asked()) == expected
            assert idle(leader).draft_tokens > 0
