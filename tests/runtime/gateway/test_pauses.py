"""What a change of epoch costs clients, as the gateway tells it: a law over drawn histories, and what the dispatcher makes of real ones."""

import asyncio
import time
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.control import EpochChange
from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.routing.pauses import KEPT, Arrival, Pauses
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.laws import share
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import Harness, a_gateway, a_leader

NAMES = "abc"


@dataclass
class Told:
    """The same by its definition: every request's waits in a list, summed when the epoch's change is over."""

    waits: dict[str, float | None] = field(default_factory=dict)
    over: list[tuple[float | None, float]] = field(
        default_factory=list
    )  # when the token before came, and the one behind
    held: int = 0
    lost: int = 0

    def account(self, epoch: int) -> EpochChange:
        pauses = [at - before for before, at in self.over if before is not None]
        return EpochChange(
            epoch,
            held=self.held,
            lost=self.lost,
            pause_seconds=max(pauses, default=0.0),
            resumed_at=min((1000 + at for _, at in self.over), default=0.0),
            recomputed_tokens=4 * len(pauses),
            refilled_tokens=2 * len(pauses),
        )


HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("token"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("end"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("epoch"), st.just(""), st.booleans()),
    ),
    max_size=30,
)


@settings(max_examples=share(300), deadline=None)
@given(history=HISTORIES)
def test_an_account_is_told_once_nobody_waits_and_has_all_who_did(history: list[tuple[str, str, bool]]) -> None:
    pauses, told, epoch, begun = Pauses(), Told(), 0, list[int]()
    expected: list[EpochChange] = []
    for at, (what, name, choice) in enumerate(history, 1):
        match what:
            case "hold":
                before = at - 0.5 if choice else None
                pauses.hold(name, before)
                if name not in told.waits:
                    told.waits[name], told.held = before, told.held + 1
            case "token":
                event = TokenEvent(name, 3, 7, 0.0, [], None, found=5, refilled=2)
                pause = pauses.resume(name, Arrival(float(at), 1000.0 + at, 10, event))
                if name in told.waits:
                    before = told.waits.pop(name)
                    told.over.append((before, float(at)))
                    assert pause == (None if before is None else at - before)
                else:
                    assert pause is None
            case "end":
                assert pauses.end(name, is_lost=choice) == (choice and name in told.waits)
                if name in told.waits:
                    del told.waits[name]
                    told.lost += choice
            case _:
                epoch += 1
                begun.append(epoch)
                pauses.start_epoch(epoch)
        is_over = not told.waits and (choice or not begun)
        assert pauses.settle(are_leaders_there=choice) == (is_over and bool(begun))
        if is_over:
            expected += [told.account(begun[0]), *map(EpochChange, begun[1:])] if begun else []
            told, begun = Told(), []
        assert pauses.told == tuple(expected[-KEPT:])


async def test_a_change_of_epoch_is_told_with_what_it_cost(gateway: Harness, leader: FakeLeader) -> None:
    """One answer that had begun, one that had not, one that comes meanwhile, and one whose client does not wait."""
    leader.allow(2)
    begun = asyncio.create_task(gateway.complete(prompt=[5, 6, 7], max_tokens=9))
    await leader.until(lambda: leader.submits)
    await gateway.until(lambda: gateway.dispatcher.load().running == 1 and leader._allowed == 0)
    others = [asyncio.create_task(gateway.complete(prompt=[5, 6], max_tokens=3)) for _ in range(2)]
    await leader.until(lambda: len(leader.submits) == 3)
    since = time.time()
    await leader.stop()
    await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 0)
    others.append(asyncio.create_task(gateway.complete(prompt=[8], max_tokens=3)))
    await gateway.until(lambda: len(gateway.dispatcher._answers) == 4)
    others.pop(0).cancel()
    await gateway.until(lambda: len(gateway.dispatcher._answers) == 3)
    async with a_leader(leader.model, epoch=2, key="another key") as successor:
        successor.found = 1
        gateway.dispatcher.set_route(route_to(successor))
        assert [(await each).status_code for each in (begun, *others)] == [200] * 3
    _, change = gateway.dispatcher.status().changes
    assert (change.epoch, change.held, change.lost) == (2, 4, 0)
    assert (
        change.recomputed_tokens == 3 + 2 - 1 - 1
    )  # the prompt and what was delivered, but for what was found and the last one
    assert since <= change.resumed_at <= time.time()
    assert change.pause_seconds > 0
    assert await gateway.metric("strata_pause_seconds_count") == 1
    assert await gateway.metric("strata_lost_requests_total") == 0
    await leader.start()


async def test_who_is_given_up_meanwhile_is_lost(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(hold_seconds=0.0)) as gateway:
        await gateway.connect(leader)
        leader.allow(1)
        running = asyncio.create_task(gateway.complete(max_tokens=3))
        await leader.until(lambda: leader.submits)
        await leader.stop()
        assert (await running).status_code == 503
        assert await gateway.metric("strata_lost_requests_total") == 1
        async with a_leader(leader.model, epoch=2, key="another key") as successor:
            gateway.dispatcher.set_route(route_to(successor))
            await gateway.until(lambda: len(gateway.dispatcher.status().changes) == 2)
        assert gateway.dispatcher.status().changes == (
            EpochChange(1),
            EpochChange(2),
        )  # that one was of no change: it had ended before
    await leader.start()
