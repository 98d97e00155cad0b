"""Who gives pages, and what happens where they do not come: the stages compute them, and nobody waits for ever."""

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from msgspec import structs

from strata_planner.contract.block_names import TOKEN_BYTES
from strata_planner.contract.control import PlannedStep, Prepare
from strata_planner.contract.frames import HeldBlock, KvPages, PagesGiven, WantPages, encode, pages_decoder
from strata_planner.contract.plan import Plan
from strata_runtime.errors import StepError
from strata_runtime.model.kv.pool import PoolShape, make_pool
from strata_runtime.slot import fetch_pace, gathering, giver
from strata_runtime.stage import handover
from strata_runtime.stage.bounds import check_pages
from strata_runtime.stage.handover import Arriving, paged
from strata_runtime.wire.client import LeaderClient, SlotClient, greedy
from strata_runtime.wire.transport import Keys, connect
from tests.laws import swept
from tests.runtime.slot.harness import PipelineHarness
from tests.runtime.slot.streams import Streams, asked, bound, computed_again, drained
from tests.runtime.slot.test_moved_pages import LAST, plan_with, prompts_again

DRAIN = ("abc", (1, 3, 5)), ("ac", (2, 5))
GOOD = KvPages(1, 3, 16, "w", 0, 0, [HeldBlock(1, b"n" * 16, b"t" * 8)])


@pytest.fixture
def plans(tiny_llama: Path) -> tuple[Plan, Plan]:
    """The middle slot of three is drained."""
    before, after = DRAIN
    return plan_with(tiny_llama, *before), plan_with(tiny_llama, *after)


def half_way(pipeline: PipelineHarness, plan: Plan) -> tuple[Streams, LeaderClient]:
    """Streams that rest."""
    streams = Streams(asked(1))
    leader = pipeline.serve(plan)
    bound(pipeline, plan, streams.all // 2)
    streams.send(leader)
    streams.listen(leader, streams.all // 2)
    drained(streams, leader)
    return streams, leader


def await_prepared(pipeline: PipelineHarness, names: str) -> None:
    for name in names:
        pipeline.slots[name].until(lambda status: status.prepare.phase == "prepared")


def to_the_end(streams: Streams, leader: LeaderClient) -> None:
    streams.send(leader)
    streams.listen(leader, streams.all)


def test_most_of_it_is_given_while_the_old_epoch_serves(
    tiny_llama: Path, plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks, between steps that go on: behind the commit only what has been written since."""
    ahead: list[tuple[int, HeldBlock]] = []
    behind: list[tuple[int, HeldBlock]] = []  # layer and block: of each, as stages get them apart
    take = Arriving.take

    def seen(arriving: Arriving, pages: KvPages, bodies: Sequence[memoryview]) -> None:
        among = ahead if threading.current_thread().name.startswith("prepare") else behind
        among.extend((pages.layer, each) for each in pages.blocks)
        take(arriving, pages, bodies)

    monkeypatch.setattr(Arriving, "take", seen)
    plans = tuple(structs.replace(each, max_model_len=400) for each in plans)
    long = greedy("r", [3 + number % 50 for number in range(100)], 250)
    with PipelineHarness("a") as pipeline:
        alone = structs.replace(plan_with(tiny_llama, "a", (LAST,)), max_model_len=400)
        wanted = pipeline.serve(alone).generate([long])["r"]
    with PipelineHarness("abc") as pipeline:
        leader = pipeline.serve(plans[0])
        leader.send(long)
        while not (got := [each.token for each in leader.events()]):
            continue
        names = list(pipeline.prepare(plans[1]))
        assert names == ["a", "c", "b"]
        await_prepared(pipeline, "ac")
        after = pipeline.commit(plans[1], names)
        while leader.heard(0.1):
            got += [each.token for each in leader.events()]
        after.send(structs.replace(long, delivered=got))
        while len(got) < len(wanted):
            got += [each.token for each in after.events()]
        assert computed_again(pipeline, plans[1]) == 0
    assert got == wanted
    assert {len(each.tokens) for _, each in ahead} == {16 * TOKEN_BYTES}
    full = {(layer, each.block, each.tokens) for layer, each in ahead}
    assert len(full) >= len(long.prompt) // 16
    assert not full & {(layer, each.block, each.tokens) for layer, each in behind}


HOW = (
    "its port is taken",
    "it is killed",
    "it does not commit",
    "it sends what no pages are",
    "it sends what nobody has foreseen",
)


@pytest.mark.parametrize("how", swept(HOW, ["it is killed", "it does not commit"]))
def test_what_a_giver_does_not_give_is_computed_again(
    plans: tuple[Plan, Plan], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(giver, "KEPT_SECONDS", 1.0)
    if how == "it sends what no pages are":
        monkeypatch.setattr(giver, "to_bytes", lambda _: b"short")
    if how == "it sends what nobody has foreseen":
        monkeypatch.delattr(Arriving, "take")
    with PipelineHarness("abc") as pipeline, socket.socket() as taken:
        streams, _ = half_way(pipeline, plans[0])
        if how == "its port is taken":
            taken.bind(("127.0.0.1", pipeline.slots["b"].address.pages_port))
            taken.listen()
        names = "".join(pipeline.prepare(plans[1]))
        await_prepared(pipeline, "ac")
        for wait in ("CONNECT_SECONDS", "SILENT_SECONDS"):  # what it gave ahead had its time
            monkeypatch.setattr(gathering, wait, 0.3)
        if how == "it is killed":
            pipeline.restart("b")
        to_the_end(streams, pipeline.commit(plans[1], names if how.startswith(("its", "it sends")) else "ac"))
        again = computed_again(pipeline, plans[1]) + prompts_again(pipeline, plans[1])
    assert streams.tokens == expected
    # What was given before the commit is whole but for the last block of each stream.
    assert again > 0
    if how in ("it is killed", "it does not commit"):
        held = sum(len(each.prompt) + len(expected[each.request]) for each in streams.submits.values())
        assert again < 16 * len(expected) * (LAST + 1) < held * 2


@pytest.mark.parametrize("each", swept([0.0, 1e-12, 1e3], [1e-12]))
def test_where_a_slot_is_lost_pages_are_fetched_only_if_that_is_quicker(
    tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, each: float
) -> None:
    """The leader is, and a layer moves between the others. `each`: seconds to compute a token in a layer, by the plan; 0: none."""
    monkeypatch.setattr(fetch_pace, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(giver, "KEPT_SECONDS", 1.0)
    monkeypatch.setattr(handover, "PART_BYTES", 1)  # a block at a time
    waits: list[bool] = []
    ask = SlotClient.ask

    def with_steps(slot: SlotClient, message: Any) -> Any:
        if isinstance(message, Prepare):
            waits.extend(source.waits for source in message.sources)
            seconds = [role.micro_batch.max_step_tokens * len(role.bits) * each for role in message.roles]
            message = structs.replace(message, steps=tuple(PlannedStep(one, one) for one in seconds))
        return ask(slot, message)

    monkeypatch.setattr(SlotClient, "ask", with_steps)
    with PipelineHarness("abc") as pipeline:
        streams, _ = half_way(pipeline, plan_with(tiny_llama, "abc", (1, 3, LAST)))
        monkeypatch.setattr(pipeline.slots["a"], "listens", lambda: False)
        pipeline.threads["a"].slot.stop()
        after = plan_with(tiny_llama, "bc", (2, LAST))
        to_the_end(streams, pipeline.serve(after))
        again = computed_again(pipeline, after)
    assert streams.tokens == expected
    assert waits == [True]
    first_two = sum(len(one.prompt) + len(expected[one.request]) for one in streams.submits.values()) * 2
    assert (again > first_two) == (each == 1e-12)


def test_an_epoch_that_supersedes_a_prepared_one_gets_its_pages_too(
    tiny_llama: Path, plans: tuple[Plan, Plan], expected: dict[str, list[int]]
) -> None:
    with PipelineHarness("abc") as pipeline:
        streams, _ = half_way(pipeline, plans[0])
        pipeline.prepare(plan_with(tiny_llama, "bc", (3, 5)))
        await_prepared(pipeline, "bc")
        to_the_end(streams, pipeline.serve(plans[1]))
        assert (computed_again(pipeline, plans[1]), prompts_again(pipeline, plans[1])) == (0, 0)
    assert streams.tokens == expected


def test_a_giver_lets_go_of_its_pages_when_all_have_them(plans: tuple[Plan, Plan]) -> None:
    with PipelineHarness("abc") as pipeline:
        pipeline.serve(plans[0]).generate(asked(1)[:2])
        pipeline.serve(plans[1]).generate(asked(1)[:2])
        left = pipeline.threads["b"].slot._giver
        assert left is not None
        left._thread.join(giver.KEPT_SECONDS / 2)
        assert not left._thread.is_alive()
        assert left._pages == ()


def test_strange_words_at_the_port_for_pages_change_nothing(plans: tuple[Plan, Plan]) -> None:
    """Of whoever has its key: garbage, another epoch's question, one for layers that nobody has."""
    with PipelineHarness("abc") as pipeline:
        pipeline.serve(plans[0]).generate(asked(1)[:2])
        giving = pipeline.prepare(plans[1])["b"].giving
        assert giving is not None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            asks = context.socket(zmq.DEALER)
            connect(asks, f"tcp://127.0.0.1:{giving.port}", Keys.of(giving.key))
            given, another = PagesGiven(2, done=True), WantPages(1, 0, [2], 1, rest=False)
            for word in (b"", b"\xff" * 9, encode(given), encode(another)):
                asks.send(word)
            asks.send(encode(WantPages(2, 0, [-1, 99, 2**40], 2**40, rest=False)))
            assert pages_decoder.decode(asks.recv()) == given
        finally:
            context.destroy(linger=0)
        await_prepared(pipeline, "ac")
        pipeline.commit(plans[1], "acb").generate(asked(1)[:2])


STRANGE = {
    "a page twice": (structs.replace(GOOD, blocks=GOOD.blocks * 2), 1, "each comes once"),
    "pages of nobody knows what": (structs.replace(GOOD, blocks=[HeldBlock(1, b"n" * 16)]), 1, "of them HeldBlock"),
    "more than a message has": (structs.replace(GOOD, blocks=GOOD.blocks * 513), 1, "513 blocks"),
    "a block before the first": (structs.replace(GOOD, blocks=[HeldBlock(-1, b"n" * 16, b"t" * 8)]), 1, "HeldBlock"),
    "half a token": (structs.replace(GOOD, blocks=[HeldBlock(1, b"n" * 16, b"t" * 7)]), 1, "HeldBlock"),
    "long weights": (structs.replace(GOOD, weights="w" * 65), 1, "65 characters"),
    "three tensors": (GOOD, 3, "3 frames"),
}


@pytest.mark.parametrize(("pages", "bodies", "reason"), STRANGE.values(), ids=STRANGE.keys())
def test_pages_that_cannot_be_are_refused(pages: KvPages, bodies: int, reason: str) -> None:
    with pytest.raises(StepError, match=reason):
        check_pages(pages, [1] * bodies, 16)


@pytest.mark.parametrize(("numbers", "fit"), [([5, 9], []), ([1, 9], [1]), ([3, 0], [3, 0])])
def test_blocks_beyond_a_smaller_pool_are_left_out(numbers: list[int], fit: list[int]) -> None:
    """All of them, too."""
    pool = make_pool(PoolShape(4, 2, 1, 3, torch.float32, torch.device("cpu")), 16)
    blocks = [HeldBlock(number, b"n" * 16, bytes([number]) * 8) for number in numbers]
    came = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1, 1).expand(2, 1, -1, 2, 3).contiguous()
    arriving = Arriving({3: pool}, page_tokens=2)
    arriving.take(structs.replace(GOOD, blocks=blocks), [memoryview(bytearray(came.numpy().tobytes()))])
    for page in range(4):
        assert torch.all(paged(pool)[0][:, :, page] == (page if page in fit else 0))
