"""Frames from someone with the right keys: a worker computes them or refuses them by name, and nothing else is harmed."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract import control
from strata_planner.contract.control import Commit, GetStatus, Prepare, SetBits, SlotStatus, Watch
from strata_planner.contract.frames import (
    FrameHeader,
    Free,
    Grammar,
    HeldBlock,
    LogitRules,
    Open,
    SampledToken,
    Sampling,
    Segment,
    StepResult,
    Survey,
    encode,
)
from strata_planner.contract.plan import Speculation
from strata_planner.contract.roles import Role, roles_of
from strata_runtime.errors import StepError
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.gathering import Gathered
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.bounds import FrameBounds
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.inheritance import Inheritance
from strata_runtime.stage.worker import Follower, Inlet, Links, Outlet
from strata_runtime.wire.client import greedy
from strata_runtime.wire.transport import Keys, Link, connect
from tests.laws import share
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import CONTROL_KEY, PipelineHarness, SlotThread
from tests.runtime.slot.strangers import until

NAMES = ["s0", "s1"]
HIDDEN = 64
EPOCH = 1
GOOD = FrameHeader(0, EPOCH, 0, "", [Segment(7, 0, 2, 1, (0,))], [Open(7, Sampling(temperature=0))], "float32", HIDDEN)


class Last(NamedTuple):
    """The last stage of two, loaded."""

    role: Role
    model: StageModel
    cache: PagedKvCache


@pytest.fixture(scope="module")
def last(tiny_llama: Path) -> Last:
    (role,) = roles_of(even_plan(tiny_llama, NAMES))["s1"]
    model = load_stage(role, tiny_llama, lambda *_: None, torch.device("cpu"))
    return Last(role, model, cache_of(role, model))


class Wire:
    """A socket that delivers what it is given, once, and keeps what is sent."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = frames
        self.sent: list[bytes] = []

    def recv_multipart(self, copy: bool) -> list[zmq.Frame]:  # noqa: FBT001  as ZeroMQ calls it
        if not self._frames:
            raise zmq.ContextTerminated
        delivered, self._frames = [zmq.Frame(frame) for frame in self._frames], ()
        return delivered

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def send_multipart(self, messages: list[bytes], copy: bool) -> None:  # noqa: FBT001
        self.sent.extend(messages)

    def close(self) -> None: ...


def run(last: Last, *frames: bytes) -> list[bytes]:
    """What a worker in a new epoch answers to this delivery."""
    last.cache.reset()
    executor = StageExecutor(last.role, last.model, last.cache)
    wire: Any = Wire(*frames)
    bounds = FrameBounds(last.role, last.model.hidden_size, last.model.vocab_size)
    outlet = Outlet(wire, executor.work)
    gathered = Gathered(executor, Inheritance(), ())
    follower = Follower(executor, Links(Inlet(wire, EPOCH, executor, bounds), outlet), gathered)
    with pytest.raises(zmq.ContextTerminated):
        follower.run()
    return list(wire.sent)


def hidden(tokens: int) -> bytes:
    return bytes(tokens * HIDDEN * 4)


NUMBERS = st.integers(-2, 130) | st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
SEQUENCES = st.sampled_from([0, 1, 2**63 - 1])
SEGMENTS = st.builds(Segment, SEQUENCES, NUMBERS, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=2).map(tuple))
TOKENS = st.lists(NUMBERS, max_size=3)
RULES = st.builds(
    LogitRules,
    st.floats(),
    st.floats(),
    st.floats(),
    st.lists(st.tuples(NUMBERS, st.floats()), max_size=2).map(tuple),
    st.lists(TOKENS.map(tuple), max_size=2).map(tuple),
    NUMBERS,
    TOKENS.map(tuple),
    st.none()
    | st.builds(
        Grammar, st.sampled_from(["regex", "json_schema"]), st.sampled_from(["", "a", "{}"]), TOKENS.map(tuple)
    ),
)
SAMPLINGS = st.builds(Sampling, st.floats(), st.floats(), NUMBERS, NUMBERS, NUMBERS, st.floats(), RULES)
OPERATIONS = st.builds(Open, SEQUENCES, SAMPLINGS, TOKENS.map(tuple), NUMBERS) | st.builds(Free, SEQUENCES)
RULED = Sampling(rules=LogitRules(1.0, 1.0, 2.0, ((5, 1.0),), ((5,), (6, 7)), 9, (127,), Grammar("regex", "a", (127,))))
STARTED = st.builds(  # so that many examples get as far as computing
    Open, SEQUENCES, st.sampled_from([Sampling(), Sampling(), RULED]), st.just((1, 2, 3)), st.integers(0, 3)
)
FRAMES = st.builds(
    FrameHeader,
    st.sampled_from([0, 0, 0, 1]),
    st.just(EPOCH),
    st.sampled_from([0, 0, 0, 1, -1, 2**62]),
    st.text(max_size=3),
    st.lists(
        SEGMENTS | st.builds(Segment, SEQUENCES, st.just(0), st.integers(1, 9), st.just(1), st.just((3,))), max_size=3
    ),
    st.lists(OPERATIONS | STARTED, max_size=4),
    st.sampled_from(["float32", "float32", "bfloat16"]),
    st.sampled_from([HIDDEN, HIDDEN, 1, -1, 2**62]),
    tokens=st.just([]) | TOKENS,
)


@given(header=FRAMES, rows=st.none() | st.integers(0, 70), extra=st.lists(st.binary(max_size=9), max_size=2))
@settings(max_examples=share(100), deadline=None)
def test_a_worker_computes_a_frame_or_refuses_it(
    last: Last, header: FrameHeader, rows: int | None, extra: list[bytes]
) -> None:
    tokens = sum(segment.length for segment in header.segments)
    body = hidden(rows if rows is not None else max(0, min(tokens, 70)))
    with contextlib.suppress(StepError):
        run(last, encode(header), body, *(extra if rows is not None else ()))
    assert len(run(last, encode(GOOD), hidden(2))) == 1, "the next epoch computes as if nothing had been"


@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=3))
@settings(max_examples=share(30), deadline=None)
def test_a_worker_refuses_what_is_no_frame(last: Last, frames: list[bytes]) -> None:
    with pytest.raises(StepError):
        run(last, *frames)


REFUSED: dict[str, tuple[list[bytes], str]] = {
    "noise": ([b"\x00\xffnoise"], "does not decode"),
    "too many choices": (
        [encode(structs.replace(GOOD, segments=[Segment(7, 0, 2, 2**40)])), hidden(2)],
        "sequence 7: 2 tokens at position 0 with 1099511627776 to sample",
    ),
    "beyond the longest sequence": (
        [encode(structs.replace(GOOD, segments=[Segment(7, 2**40, 2, 1)])), hidden(2)],
        "ends within the 128 positions",
    ),
    "a page that is none": (
        [encode(structs.replace(GOOD, segments=[Segment(7, 0, 2, 1, (2**40,))])), hidden(2)],
        "was given page 1099511627776",
    ),
    "no page": (
        [encode(structs.replace(GOOD, segments=[Segment(7, 0, 2, 1)])), hidden(2)],
        "its table has 0 pages",
    ),
    "too many pages": (
        [encode(structs.replace(GOOD, segments=[Segment(7, 0, 2, 1, (0,) * 200)])), hidden(2)],
        "200 blocks; 192 at most",
    ),
    "drafts of two tokens": ([encode(structs.replace(GOOD, draft=True)), hidden(2)], "step 0 drafts: it has one token"),
    "too few rows": ([encode(GOOD), hidden(1)], "its 2 tokens are 1 of 512"),
    "no rows": ([encode(GOOD)], r"frames of \[\] bytes follow the header"),
    "another width": ([encode(structs.replace(GOOD, hidden=1)), hidden(2)], r"hidden states of \('float32', 1\)"),
    "another replica": ([encode(structs.replace(GOOD, replica=3)), hidden(2)], "for replica 3"),
    "a result": ([encode(StepResult(0, EPOCH, 0, []))], "stage 1 got a result"),
    "too long a name of weights": (
        [encode(structs.replace(GOOD, weights="x" * 100_000)), hidden(2)],
        "100000 characters of weights",
    ),
    "tokens that are none": (
        [encode(structs.replace(GOOD, operations=[Open(7, Sampling(), (1, 128), 2)])), hidden(2)],
        r"prompt of 2 of its 2 tokens; tokens of this model are 0..127",
    ),
    "a prompt longer than all": (
        [encode(structs.replace(GOOD, operations=[Open(7, Sampling(), (1,), 2)])), hidden(2)],
        "a prompt of 2 of its 1 tokens",
    ),
    "too many tokens": (
        [encode(structs.replace(GOOD, operations=[Open(7, Sampling(), (1,) * 129, 2)])), hidden(2)],
        "129 tokens of a new sequence; 128 at most",
    ),
    "rules that cannot be": (
        [encode(structs.replace(GOOD, operations=[Open(7, Sampling(rules=LogitRules(ends=(128,))))])), hidden(2)],
        "sequence 7 cannot be sampled: tokens of this model are 0..127",
    ),
    "tokens of fewer than its segments": (
        [encode(structs.replace(GOOD, tokens=[5])), hidden(2)],
        "tells of 1 tokens from 5 to 5 for the 2 of its segments",
    ),
    "a token that is none": ([encode(structs.replace(GOOD, tokens=[5, 128])), hidden(2)], "2 tokens from 5 to 128"),
    "a negative token": ([encode(structs.replace(GOOD, tokens=[-1, 5])), hidden(2)], "2 tokens from -1 to 5"),
    "too long a root": (
        [encode(structs.replace(GOOD, operations=[Open(7, Sampling(), root=b"x" * 17)])), hidden(2)],
        "17 bytes before the first block of a sequence; 16 at most",
    ),
    "a block twice": (
        [encode(Survey(0, EPOCH, "w", 3, blocks=[HeldBlock(1, b"n" * 16), HeldBlock(1, b"m" * 16)]))],
        "2 blocks, of them None: each is told of once",
    ),
    "a name that is none": ([encode(Survey(0, EPOCH, "w", 3, blocks=[HeldBlock(1, b"n")]))], "1 blocks, of them Held"),
    "a block that is none": ([encode(Survey(0, EPOCH, "w", 3, blocks=[HeldBlock(-1, b"n" * 16)]))], "block=-1"),
    "half a token": ([encode(Survey(0, EPOCH, "w", 3, blocks=[HeldBlock(1, b"n" * 16, b"t")]))], "tokens=b't'"),
    "more tokens than a block has": (
        [encode(Survey(0, EPOCH, "w", 3, blocks=[HeldBlock(1, b"n" * 16, b"t" * 8 * 17)]))],
        "up to 16 tokens of 8 bytes",
    ),
    "too long a header": ([encode(structs.replace(GOOD, weights="x" * 2**26)), hidden(2)], "at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_value_and_the_rule(last: Last, case: str) -> None:
    frames, reason = REFUSED[case]
    with pytest.raises(StepError, match=reason):
        run(last, *frames)


def test_frames_of_another_epoch_are_dropped_before_they_are_judged(last: Last) -> None:
    assert run(last, encode(structs.replace(GOOD, epoch=9, hidden=1)), b"any") == []


TOKEN = SampledToken(7, 1, 5, 0.0, [])
RESULTS = {
    "a token that is none": ([structs.replace(TOKEN, token=128)], "tokens of this model are 0..127"),
    "a reason that is none": ([structs.replace(TOKEN, token=-3)], "tokens of this model are 0..127"),
    "a negative one among the likely": ([structs.replace(TOKEN, top=[(-1, 0.0)])], "tokens of this model"),
    "too many log probabilities": ([structs.replace(TOKEN, top=[(1, 0.0)] * 21)], "21 log probabilities"),
    "more tokens than a step has": ([TOKEN] * 65, "65 tokens; 64 at most"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_leader_refuses_results_that_cannot_be(tiny_llama: Path, case: str) -> None:
    tokens, reason = RESULTS[case]
    (role,) = roles_of(even_plan(tiny_llama, NAMES))["s0"]
    with pytest.raises(StepError, match=reason):
        FrameBounds(role, HIDDEN, 128).check(StepResult(0, EPOCH, 0, tokens), [])


def of_a_head(tiny_llama: Path, slot: str) -> FrameBounds:
    """Of a role beside which a head reads the outputs of the layers 0 and 5, one of each stage."""
    plan = even_plan(tiny_llama, NAMES)
    (role,) = roles_of(structs.replace(plan, speculation=Speculation("eagle", 4, draft_uri="x", fused=(0, 5))))[slot]
    return FrameBounds(role, HIDDEN, 128)


@given(bodies=st.lists(st.sampled_from([0, 4 * HIDDEN, 8 * HIDDEN, 7, 4 * HIDDEN * 65]), max_size=3))
def test_states_for_a_head_come_whole_or_are_refused(tiny_llama: Path, bodies: list[int]) -> None:
    """With frames those of the layers before, with results those of all, of equally many tokens."""
    row = 4 * HIDDEN
    whole = {
        "s1": bodies == [2 * row, 2 * row],
        "s0": len(bodies) == 2 and len({*bodies}) == 1 and bodies[0] in {0, row, 2 * row},
    }
    for slot, message in (("s1", GOOD), ("s0", StepResult(0, EPOCH, 0, [TOKEN]))):
        bounds = of_a_head(tiny_llama, slot)
        assert bounds.largest_bytes >= 64 * row
        with contextlib.nullcontext() if whole[slot] else pytest.raises(StepError, match="bytes follow"):
            bounds.check(message, bodies)


@pytest.fixture(scope="module")
def pipeline(tiny_llama: Path) -> Iterator[PipelineHarness]:
    with PipelineHarness(NAMES) as pipeline:
        yield pipeline


def sent_to_a_running_slot(pipeline: PipelineHarness, slot: str, frames: list[bytes]) -> None:
    """By someone with the key of its data port."""
    running = pipeline.threads[slot].slot._running
    assert running is not None
    (role,) = running.roles
    with zmq.Context() as context, context.socket(zmq.PUSH) as neighbour:
        connect(neighbour, f"tcp://127.0.0.1:{pipeline.slots[slot].address.data_port}", Keys.of(role.keys.own))
        neighbour.linger = -1
        neighbour.send_multipart(frames)


def of_epoch(epoch: int, header: FrameHeader) -> bytes:
    return encode(structs.replace(header, epoch=epoch))


HUGE = structs.replace(GOOD, segments=[Segment(7, 0, 2, 2**40, (0,))])
SENT: dict[str, tuple[str, Callable[[int], list[bytes]], str]] = {
    "noise to a stage": ("s1", lambda _: [b"\x00\xffnoise"], "does not decode"),
    "noise to the leader": ("s0", lambda _: [b"\x00\xffnoise", b""], "does not decode"),
    "a frame to the leader": ("s0", lambda epoch: [of_epoch(epoch, GOOD), hidden(2)], "the leader got a frame"),
    "too many choices": ("s1", lambda epoch: [of_epoch(epoch, HUGE), hidden(2)], "1099511627776 to sample"),
}


@pytest.mark.parametrize("case", SENT)
def test_a_refused_frame_ends_its_epoch_and_not_the_slot(
    tiny_llama: Path, pipeline: PipelineHarness, case: str
) -> None:
    slot, frames, reason = SENT[case]
    plan = even_plan(tiny_llama, NAMES)
    pipeline.serve(plan)
    sent_to_a_running_slot(pipeline, slot, frames(pipeline.epoch))
    assert reason in pipeline.slots[slot].until(lambda status: bool(status.failure)).failure
    assert len(pipeline.serve(plan).generate([greedy("a", [1, 2, 3], 4)])["a"]) == 4
    assert [pipeline.slots[name].ask(GetStatus()).failure for name in NAMES] == ["", ""]


@pytest.mark.slow
def test_a_message_above_every_bound_ends_nothing_but_its_connection(
    tiny_llama: Path, pipeline: PipelineHarness
) -> None:
    leader = pipeline.serve(even_plan(tiny_llama, NAMES))
    running = pipeline.threads["s1"].slot._running
    assert running is not None
    (role,) = running.roles
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        link = Link(sender, "s1", 0.0, 1e9)
        connect(sender, f"tcp://127.0.0.1:{pipeline.slots['s1'].address.data_port}", Keys.of(role.keys.own))
        sender.send(bytes(1 << 26))
        until(lambda: link.read(0.0), "it was not shown out")
        link.monitor.close(linger=0)
    assert len(leader.generate([greedy("a", [1, 2, 3], 4)])["a"]) == 4


REQUESTS = (
    st.from_type(Commit)
    | st.from_type(SetBits)
    | st.builds(Prepare, st.integers(-9, 9), st.text(), st.just(()), st.just({}))
    | st.just(GetStatus())
    | st.just(Watch())
)


@given(sent=st.lists(st.binary(max_size=20) | REQUESTS.map(control.encode), min_size=1, max_size=3))
@settings(max_examples=share(25), deadline=None)
def test_a_slot_answers_whatever_came_to_its_control_port(pipeline: PipelineHarness, sent: list[bytes]) -> None:
    """Frames of one message: more than one is no message."""
    slot = pipeline.slots["s0"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as controller:
        connect(controller, f"tcp://127.0.0.1:{slot.address.control_port}", Keys.of(CONTROL_KEY))
        controller.send_multipart(sent)
        controller.send(control.encode(GetStatus()))
        statuses = [control.status_decoder.decode(controller.recv())]
        assert {status.slot for status in statuses if isinstance(status, SlotStatus)} == {"s0"}
    assert slot.ask(GetStatus()).slot == "s0"


def test_an_epoch_that_cannot_be_in_force_is_a_failure_and_not_the_end(tiny_llama: Path) -> None:
    """Who holds the control key may say anything: here addresses without the slot's own."""
    slot = SlotThread("s0")
    try:
        (role,) = roles_of(even_plan(tiny_llama, ["s0"]))["s0"]
        slot.ask(Prepare(epoch=1, key="k", roles=(role,), slots={}))
        slot.until(lambda status: status.prepare.phase == "prepared")
        assert slot.ask(Commit(epoch=1)).failure == "epoch 1: KeyError: 's0'"
    finally:
        slot.close()
