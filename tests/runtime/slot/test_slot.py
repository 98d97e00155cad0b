"""Slots as a controller and a gateway meet them: real sockets, a real (tiny) model, no processes."""

from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from msgspec import structs
from transformers import AutoModelForCausalLM

from strata_planner.contract.control import Commit, Prepare
from strata_planner.contract.formats import FormatName
from strata_planner.contract.frames import Abort, Hello, LeaderHello, Sampling, Submit, Tokens
from strata_planner.contract.plan import Speculation
from strata_planner.contract.roles import roles_of
from strata_planner.question.model import Model
from strata_runtime.errors import InputError, RequestRefusedError, RuntimeFaultError
from strata_runtime.wire.client import LeaderClient, greedy
from strata_runtime.wire.transport import Keys, listen
from tests.laws import swept
from tests.runtime.plans import even_plan
from tests.runtime.slot.asked import STRATA_TINY, held_and_free, penalized
from tests.runtime.slot.harness import PipelineHarness, SlotThread

PROMPTS = {"a": [1, 5, 9, 2, 6], "b": [3] * 30, "c": [7, 8], "d": list(range(20, 45))}
ANSWER = 12
LAYERS = 6
SHALLOW = 3


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    """What the unsliced model generates greedily, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    answers = {}
    for name, prompt in PROMPTS.items():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        answers[name] = output[0, len(prompt) :].tolist()
    return answers


@pytest.mark.parametrize("stages", swept([1, 2, 3], [3]))
def test_tokens_equal_the_unsliced_models(tiny_llama: Path, expected: dict[str, list[int]], stages: int) -> None:
    names = [f"s{place}" for place in range(stages)]
    with PipelineHarness(names) as pipeline:
        leader = pipeline.serve(even_plan(tiny_llama, names))
        got = leader.generate([greedy(name, prompt, ANSWER) for name, prompt in PROMPTS.items()])
    assert got == expected


@pytest.mark.slow
def test_a_head_of_8_bits_says_the_same_wherever_it_is(shallow_llama: Path) -> None:
    """On the only stage, on the last of three, on two ranks; and a slot that holds another one loads it."""
    asked = penalized(4, 20)
    with PipelineHarness(["s0", "s1", "s2"]) as pipeline:
        whole = pipeline.serve(even_plan(shallow_llama, ["s0"])).generate(asked)
        rounded = [
            structs.replace(even_plan(shallow_llama, slots, ranks=ranks), head_format="int8")
            for slots, ranks in ((["s0"], 1), (["s0", "s1", "s2"], 1), (["s0"], 2))
        ]
        one, three, two_ranks = (pipeline.serve(plan).generate(asked) for plan in rounded)
    assert one == three == two_ranks
    assert one != whole


@pytest.mark.parametrize("stages", swept([1, 3], [3]))
def test_shared_prefixes_and_too_little_room_change_no_text(shallow_llama: Path, stages: int) -> None:
    """Seven requests with a prefix in common, in blocks for some of them: found, driven out, computed again."""
    names = [f"s{place}" for place in range(stages)]
    asked = [greedy(f"r{number}", [*range(20, 60), number], 30) for number in range(7)]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(shallow_llama, names, pages=12)
        leader = pipeline.serve(plan)
        expected = {}
        for each in asked:
            expected |= leader.generate([structs.replace(each, salt=each.request)])
        leader = pipeline.serve(plan)
        for each in asked:
            leader.send(each)
        got: dict[str, list[int]] = {each.request: [] for each in asked}
        found = 0
        while any(len(tokens) < 30 for tokens in got.values()):
            for event in leader.events():
                got[event.request].append(event.token)
                found += event.found if event.index == 0 else 0
        assert got == expected
        assert found >= 6 * 32
        assert leader.hello().preemptions > 0


@pytest.mark.slow  # the test below has drafts of fewer bits
@pytest.mark.parametrize("stages", swept([1, 3], [3]))
def test_speculation_changes_no_text(shallow_llama: Path, stages: int) -> None:
    """Greedy and drawn, in the midst of others: what is verified is what is drawn."""
    names = [f"s{place}" for place in range(stages)]
    plan = even_plan(shallow_llama, names)
    asked = [
        Submit(
            f"r{number}", [*range(9, 15)] * 2 + [number], [], 40, [], Sampling(0.9 * (number % 2), top_k=3, seed=number)
        )
        for number in range(5)
    ]
    with PipelineHarness(names) as pipeline:
        expected = pipeline.serve(plan).generate(asked)
        for mode in ("suffix", "auto"):
            leader = pipeline.serve(structs.replace(plan, speculation=Speculation(mode, 4)))
            assert leader.generate(asked) == expected, mode
            while (hello := leader.hello()).running:  # told by another thread than the one that steps
                pass
            assert mode == "auto" or 0 < hello.accepted_tokens <= hello.draft_tokens
            assert hello.kv_usage == 0


@pytest.mark.slow  # loading/test_drafts.py, and the law of all drafts in scheduler/test_engine.py
@pytest.mark.parametrize("case", swept([("any8", 1), ("any8", 3), ("dense", 1), ("dense", 3)], [("any8", 1)]), ids=str)
def test_drafts_of_four_bits_change_no_text(shallow_llama: Path, case: tuple[FormatName, int]) -> None:
    """Greedy, drawn and with penalties, in blocks that are too few for all: what was drafted is never what others or the text go on from."""
    name, stages = case
    names = [f"s{place}" for place in range(stages)]
    plan = even_plan(shallow_llama, names, formats=[name] * SHALLOW)
    asked = penalized()
    with PipelineHarness(names) as pipeline:
        expected = pipeline.serve(plan).generate(asked)
        scarce = even_plan(shallow_llama, names, formats=[name] * SHALLOW, pages=12)
        for each in (plan, scarce):
            leader = pipeline.serve(structs.replace(each, speculation=Speculation("selfPrecision", 4)))
            assert leader.generate(asked) == expected
            while (hello := leader.hello()).running:
                pass
            assert 0 < hello.accepted_tokens < hello.draft_tokens, "other weights draft than those that verify"
            assert (hello.preemptions > 0) == (each is scarce)
            assert hello.kv_usage == 0


@pytest.mark.slow
def test_forms_are_kept_by_drafts_of_fewer_bits() -> None:
    """Over a model that knows its language, each answer in the midst of others that compile and end."""
    plan = even_plan(
        STRATA_TINY, ["s0"], formats=["any8"] * 2 + ["int8"] * (Model.from_folder(STRATA_TINY).num_layers - 2)
    )
    asked = held_and_free()
    with PipelineHarness(["s0"]) as pipeline:
        expected = pipeline.serve(plan).generate(asked)
        leader = pipeline.serve(structs.replace(plan, speculation=Speculation("selfPrecision", 4)))
        assert leader.generate(asked) == expected
        assert leader.hello().accepted_tokens > 0


def test_who_asks_for_drafts_and_has_no_fewer_bits_is_told_so(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(tiny_llama, ["s0"], formats=["int8"] * LAYERS)
        with pytest.raises(
            RuntimeFaultError, match=r"no layer of replica 0 has planes of more bits \(this stage: int8\)"
        ):
            pipeline.serve(structs.replace(plan, speculation=Speculation("selfPrecision", 4)))


def test_a_lost_slot_is_named_and_a_new_epoch_goes_on_with_the_same_tokens(
    tiny_llama: Path, expected: dict[str, list[int]]
) -> None:
    names = ["s0", "s1", "s2"]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names)
        leader = pipeline.serve(plan)
        leader.send(greedy("a", PROMPTS["a"], ANSWER))
        delivered: list[int] = []
        while len(delivered) < 4:
            delivered += [event.token for event in leader.events()]
        pipeline.restart("s1")
        for neighbour in ("s0", "s2"):
            status = pipeline.slots[neighbour].until(lambda status: bool(status.lost_peers))
            assert {loss.slot for loss in status.lost_peers} == {"s1"}
        rest = pipeline.serve(plan).generate([greedy("a", PROMPTS["a"], ANSWER, delivered)])
    assert delivered + rest["a"] == expected["a"]


def test_a_leader_tells_at_once_which_stage_is_lost_however_far_it_is(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own connections reach the next stage and the last one. No slot looks at its links before they say something."""
    monkeypatch.setattr("strata_runtime.slot.slot.LOOP_MILLISECONDS", 600_000)
    names = ["s0", "s1", "s2", "s3"]
    with PipelineHarness(names) as pipeline:
        plan = even_plan(tiny_llama, names)
        leader = pipeline.serve(plan)
        leader.generate(
            [greedy("a", PROMPTS["a"], 1)]
        )  # through all links: one that never was is missed by the clock alone
        assert leader.hello().lost == ""
        pipeline.restart("s2")
        news = leader.receive()  # that nobody has asked for
        assert isinstance(news, LeaderHello)
        assert news.lost == leader.hello().lost == "s2"
        assert pipeline.serve(plan).hello().lost == ""


def test_abort_frees_the_sequence_and_others_go_on(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    with PipelineHarness(["s0", "s1"]) as pipeline:
        leader = pipeline.serve(even_plan(tiny_llama, ["s0", "s1"], pages=8))
        leader.send(greedy("long", [4] * 113, 14))  # takes all eight pages
        leader.send(greedy("a", PROMPTS["a"], ANSWER))
        assert {event.request for event in leader.events()} == {"long"}
        leader.send(Abort("long"))
        tokens: list[int] = []
        while len(tokens) < ANSWER:
            tokens += [event.token for event in leader.events() if event.request == "a"]
    assert tokens == expected["a"]


def test_a_request_beyond_the_budget_is_rejected_with_the_numbers(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(even_plan(tiny_llama, ["s0"], pages=2))
        with pytest.raises(RequestRefusedError, match=r"30 prompt tokens \+ max_tokens 10 = 40 exceed the 32 tokens"):
            leader.generate([greedy("big", [1] * 30, 10)])


def test_prepare_is_idempotent_and_a_higher_epoch_supersedes(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(tiny_llama, ["s0"])
        first = pipeline.prepare(plan)["s0"]
        second = pipeline.prepare(plan)["s0"]
        slot = pipeline.slots["s0"]
        slot.until(lambda status: status.prepare.phase == "prepared" and status.prepare.epoch == second.epoch)
        assert slot.ask(first).prepare.epoch == second.epoch
        assert slot.ask(Commit(epoch=first.epoch)).committed_epoch == 0, "what is not prepared is not committed"
        assert slot.ask(Commit(epoch=second.epoch)).committed_epoch == second.epoch
        assert slot.ask(Commit(epoch=first.epoch)).committed_epoch == second.epoch


def test_equal_roles_keep_their_weights_over_epochs(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(tiny_llama, ["s0"])
        pipeline.serve(plan)
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        weights = running.roles[0].loaded.model
        leader = pipeline.serve(plan)
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        assert running.roles[0].loaded.model is weights
        assert leader.generate([greedy("c", PROMPTS["c"], ANSWER)]) == {"c": expected["c"]}


def test_a_role_whose_model_does_not_exist_is_refused_with_the_path(tiny_llama: Path, tmp_path: Path) -> None:
    plan = even_plan(tiny_llama, ["s0"])
    slot = SlotThread("s0")
    try:
        role = roles_of(plan)["s0"][0]
        missing = Prepare(
            epoch=1,
            key="k",
            roles=(msgspec.structs.replace(role, model_uri=str(tmp_path / "gone")),),
            slots={"s0": slot.address},
        )
        slot.ask(missing)
        state = slot.until(lambda status: status.prepare.phase != "loading").prepare
        assert state.phase == "refused"
        assert str(tmp_path / "gone") in state.reason
        good = Prepare(epoch=2, key="k", roles=(role,), slots={"s0": slot.address})
        slot.ask(good)
        assert slot.until(lambda status: status.prepare.phase != "loading").prepare.phase == "prepared"
    finally:
        slot.close()


def test_a_zombie_of_the_old_epoch_is_not_heard(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        plan = even_plan(tiny_llama, ["s0"])
        old = pipeline.serve(plan)
        pipeline.serve(plan)
        old.send(Hello())
        assert not old.heard(0.5), "the new epoch's sockets refuse the old key"


def test_two_gateways_each_get_their_own_tokens(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    with PipelineHarness(["s0", "s1"]) as pipeline:
        first = pipeline.serve(even_plan(tiny_llama, ["s0", "s1"]))
        second = LeaderClient(pipeline.slots["s0"].address, pipeline.key)
        first.send(greedy("a", PROMPTS["a"], ANSWER))
        got = second.generate([greedy("b", PROMPTS["b"], ANSWER)]) | first.collect(["a"])
        second.close()
    assert got == {"a": expected["a"], "b": expected["b"]}


def test_a_port_in_use_is_named() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first = context.socket(zmq.ROUTER)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(InputError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
        listen(context.socket(zmq.ROUTER), f"tcp://127.0.0.1:{port}", Keys.of("x"))
    context.destroy(linger=0)


def test_the_leader_says_its_load(tiny_llama: Path) -> None:
    with PipelineHarness(["s0"]) as pipeline:
        leader = pipeline.serve(even_plan(tiny_llama, ["s0"], pages=8))
        leader.send(greedy("long", [4] * 30, 60))
        message = leader.receive()
        assert isinstance(message, Tokens)
        assert message.running == 1
        assert message.kv_usage == pytest.approx(2 / 8), "what its prompt holds"
