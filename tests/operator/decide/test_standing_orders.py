"""Standing orders as values: their numbers, what gateways are told, what is recorded; and two gateways that carry them out beside each other."""

import base64

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata_operator.decide import standing_orders
from strata_operator.decide.epochs import Epoch, Ledger, Observed, next_steps
from strata_operator.decide.planning import order_terms_of
from strata_operator.decide.standing_orders import OrderTerms, carried_out, ordered_epochs, set_orders, untold
from strata_operator.render.epoch import epoch_objects, read_epoch
from strata_planner.contract.control import (
    CarryOut,
    Commit,
    CommitOrder,
    Prepare,
    SetOrders,
    SlotDoor,
    SlotStatus,
    encode,
    prepare_decoder,
)
from strata_planner.contract.keys import seal_of
from strata_planner.contract.plan import Plan, StandingOrder
from strata_planner.question.cluster import Cluster, Device, Node
from strata_runtime.gateway.standing.decision import Seen, Step, TakeRoute
from strata_runtime.gateway.standing.decision import next_steps as steps_of_orders
from tests.laws import share
from tests.operator.builders import a_deployment
from tests.operator.decide.test_epochs import World
from tests.operator.fakes import FakeSlot, a_plan, addresses_of, replicas_of

SLOTS = ("a", "b", "c", "d")
TERMS = OrderTerms(silence_seconds=20.0, grace_seconds=5.0)
SECRETS = {slot: f"secret-{slot}" for slot in SLOTS}
DOORS = {slot: SlotDoor(slot, 7070, "public", "door") for slot in SLOTS}


def with_orders(plan: Plan) -> Plan:
    """The neighbour of a lost slot takes its layers."""
    orders = []
    for replica in plan.replicas:
        names = [stage.slot for stage in replica.stages]
        for lost in names:
            left = a_plan(*(name for name in names if name != lost)).replicas[0]
            changed = msgspec.structs.replace(left, replica=replica.replica)
            orders.append(StandingOrder((lost,), (changed,), plan.prediction, "neighbours", 2, 0, 1 << 20, 0.5))
    return msgspec.structs.replace(plan, orders=tuple(orders))


PLAN = with_orders(replicas_of(a_plan("a", "b"), a_plan("c", "d")))


def serving() -> tuple[World, Epoch]:
    world = World(PLAN)
    world.slots = {name: FakeSlot(name) for name in SLOTS}
    world.up = set(SLOTS)
    while steps := next_steps(PLAN, world.ledger, seen_of(world)):
        for step in steps:
            world.do(step)
        for slot in world.slots.values():
            slot.finish_loading()
    assert world.ledger.newest is not None
    return world, world.ledger.newest


def seen_of(world: World) -> Observed:
    return Observed(
        slots={name: slot.status() for name, slot in world.slots.items() if name in world.up},
        gateways={"gateway": world.gateway.status()},
        addresses=addresses_of(*SLOTS),
    )


def told(terms: OrderTerms = TERMS) -> tuple[World, Epoch, SetOrders]:
    world, epoch = serving()
    orders = set_orders(epoch, seen_of(world), SECRETS, DOORS, terms)
    assert orders is not None
    return world, epoch, orders


def test_each_order_has_a_number_of_its_own_below_whatever_a_controller_makes() -> None:
    world, epoch, orders = told()
    made = ordered_epochs(epoch)
    numbers = [each.epoch.number for each in made]
    assert numbers == list(range(epoch.number + 1, epoch.last_number + 1)) == [each.number for each in orders.orders]
    assert len({each.epoch.key for each in made} | {epoch.key}) == len(made) + 1
    assert [each.lost for each in made if each.lost] == [order.lost for order in PLAN.orders or ()]
    assert {each.epoch.last_number for each in made} == {epoch.last_number}
    assert not any(ordered_epochs(each.epoch) for each in made), "what an order has made has none to give"
    world.slots["a"].restart()
    (step,) = next_steps(PLAN, world.ledger, seen_of(world))
    assert getattr(step, "number", 0) == epoch.last_number + 1


def test_replicas_that_lose_nothing_go_on() -> None:
    _, epoch, orders = told()
    for order in orders.orders:
        hurt = {*order.renewed} | {
            each.replica for each in epoch.plan.replicas if {*order.lost} & {stage.slot for stage in each.stages}
        }
        for words in order.slots.values():
            prepare = prepare_decoder.decode(words.prepare)
            for place, role in enumerate(prepare.roles):
                assert prepare.formed_in(place) == (order.number if role.replica in hurt else epoch.number)


def test_every_slot_gets_words_that_are_sealed_for_it() -> None:
    _, epoch, orders = told()
    for order in orders.orders:
        assert not {*order.lost} & set(order.slots)
        for slot, words in order.slots.items():
            assert words.seal == seal_of(SECRETS[slot], words.sealed)
            assert (words.after, words.silence_seconds) == (epoch.number, TERMS.silence_seconds)


def test_a_seal_holds_over_the_wire_for_the_terms_that_objects_give() -> None:
    """Whole seconds there, numbers with a point once they were sent."""
    wish = a_deployment().with_spec(replanning={"takeover": {"standingOrders": {"silenceSeconds": 10}}}).build()
    terms = order_terms_of(wish)
    assert terms is not None
    _, _, orders = told(terms)
    received = msgspec.json.decode(encode(orders), type=SetOrders)
    for order in received.orders:
        for slot, words in order.slots.items():
            taken = msgspec.json.decode(encode(words), type=CarryOut)
            assert taken.seal == seal_of(SECRETS[slot], taken.sealed)


def test_gateways_are_told_nothing_while_a_slot_would_not_understand_it_or_is_away() -> None:
    world, epoch = serving()
    world.slots["c"].protocol = 2
    assert set_orders(epoch, seen_of(world), SECRETS, DOORS, TERMS) is None
    world.slots["c"].protocol = 3
    world.up.discard("c")
    assert set_orders(epoch, seen_of(world), SECRETS, DOORS, TERMS) is None


def test_orders_beyond_what_a_message_holds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world, epoch = serving()
    whole = set_orders(epoch, seen_of(world), SECRETS, DOORS, TERMS)
    assert whole is not None
    assert untold(epoch, whole) == ()
    size = sum(len(encode(each)) for each in whole.orders)
    monkeypatch.setattr(standing_orders, "MOST_BYTES", size - 1)
    cut = set_orders(epoch, seen_of(world), SECRETS, DOORS, TERMS)
    assert cut is not None
    assert untold(epoch, cut) == epoch.plan.orders[-1].lost


def test_a_record_says_which_numbers_are_taken() -> None:
    _, epoch = serving()
    nodes = tuple(Node(name, (Device("cpu", 1, 1 << 30, 1),)) for name in SLOTS)
    for each in ordered_epochs(epoch):
        secret, config_map = epoch_objects(a_deployment().build(), each.epoch, Cluster(nodes))
        stored = {name: base64.b64encode(text.encode()).decode() for name, text in secret["stringData"].items()}
        read, _ = read_epoch({"data": stored}, config_map)
        assert read == each.epoch


@pytest.mark.parametrize("who", ["slot", "gateway", "nobody"])
def test_what_is_served_is_recorded_and_what_was_only_prepared_is_not(who: str) -> None:
    world, _, orders = told()
    order = next(each for each in orders.orders if each.lost == ("a",))
    for slot, words in order.slots.items():
        world.slots[slot].handle(prepare_decoder.decode(words.prepare))
        world.slots[slot].finish_loading()
    if who == "slot":
        world.slots["b"]._switch_over()
    if who == "gateway":
        world.gateway.handle(order.route)
    found = carried_out(world.ledger, seen_of(world))
    assert (found and found.epoch.number) == (None if who == "nobody" else order.number)
    assert found is None or found.epoch.plan == PLAN.after(PLAN.orders[0] if PLAN.orders else None)


class Ordered(FakeSlot):
    """Takes orders as a slot does that hears no controller."""

    keys: dict[int, str]  # of all: epoch -> key

    def carry_out(self, words: CarryOut) -> None:
        if words.seal == seal_of(SECRETS[self.name], words.sealed) and self.committed in (0, words.after):
            self.handle(prepare_decoder.decode(words.prepare))

    def handle(self, message: object) -> SlotStatus:
        if isinstance(message, Prepare):
            assert self.keys.setdefault(message.epoch, message.key) == message.key, "a number stands for two epochs"
        return super().handle(message)  # type: ignore[arg-type]


class TwoGateways(RuleBasedStateMachine):
    """No controller is there; each of two gateways reaches some of the slots, and what it says may come late."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.epoch, self.orders = told()
        keys: dict[int, str] = {}
        for name in SLOTS:
            fake = self.world.slots[name]
            fake.__class__, fake.keys = Ordered, keys  # type: ignore[assignment, attr-defined]
        self.cut: set[tuple[int, str]] = set()
        self.routed = [self.epoch.number, self.epoch.number]
        self.late: list[Step] = []

    def steps(self, gateway: int) -> tuple[Step, ...]:
        there = {name for name in self.world.up if (gateway, name) not in self.cut}
        seen = Seen({name: self.world.slots[name].status() for name in there}, dict.fromkeys(set(SLOTS) - there, 60.0))
        return steps_of_orders(self.orders, seen, self.routed[gateway])

    def do(self, step: Step, gateway: int) -> None:
        if isinstance(step, TakeRoute):
            served = {self.world.slots[slot].committed for slot in step.order.slots}
            assert min(served) >= step.order.number, "it is routed to before all serve"
            self.routed[gateway] = step.order.number
            return
        slot = self.world.slots[step.slot]
        if step.slot not in self.world.up:
            return
        if isinstance(step.message, CommitOrder):
            number = step.message.epoch
            order = next(each for each in self.orders.orders if each.number == number)
            if not any(number in each.ever_committed for each in self.world.slots.values()):
                assert all(number in self.world.slots[name].ever_prepared for name in order.slots), "another one loads"
            slot.handle(Commit(number))
        else:
            slot.carry_out(step.message)  # type: ignore[attr-defined]

    @rule(gateway=st.integers(0, 1))
    def a_gateway_acts(self, gateway: int) -> None:
        for step in self.steps(gateway):
            self.do(step, gateway)

    @rule(gateway=st.integers(0, 1))
    def what_it_says_is_delayed(self, gateway: int) -> None:
        self.late += [step for step in self.steps(gateway) if not isinstance(step, TakeRoute)]

    @rule(which=st.integers(0, 9))
    def something_late_arrives(self, which: int) -> None:
        if which < len(self.late):
            self.do(self.late.pop(which), 0)

    @rule(slot=st.sampled_from(SLOTS))
    def loaded(self, slot: str) -> None:
        self.world.slots[slot].finish_loading()

    @rule(slot=st.sampled_from(SLOTS))
    def dies(self, slot: str) -> None:
        self.world.up.discard(slot)
        for name in SLOTS:
            roles = self.world.slots[name].running.values()
            if any(slot in (each.role.next.slot, each.role.previous.slot) for each in roles) and name != slot:
                self.world.slots[name].lose(slot)

    @rule(slot=st.sampled_from(SLOTS))
    def is_started_anew(self, slot: str) -> None:
        self.dies(slot)
        self.world.slots[slot].restart()
        self.world.up.add(slot)

    @rule(gateway=st.integers(0, 1), slot=st.sampled_from(SLOTS), apart=st.booleans())
    def a_gateway_is_cut_off(self, gateway: int, slot: str, apart: bool) -> None:  # noqa: FBT001
        (self.cut.add if apart else self.cut.discard)((gateway, slot))

    @invariant()
    def no_gateway_goes_back(self) -> None:
        assert all(self.epoch.number <= routed <= self.epoch.last_number for routed in self.routed)

    def teardown(self) -> None:
        """A controller comes, and everybody is back: it goes on from what is served, and all serve its plan."""
        for name in set(SLOTS) - self.world.up:
            self.world.slots[name].restart()
        self.world.up = set(SLOTS)
        for number in self.routed:
            order = next((each for each in self.orders.orders if each.number == number), None)
            if order is not None:
                self.world.gateway.handle(order.route)
        ledger, served = self.world.ledger, carried_out(self.world.ledger, seen_of(self.world))
        if served is not None:
            ledger = Ledger(served.epoch, served.epoch.number, served.epoch)
        self.world.ledger = ledger
        for _ in range(50):
            for slot in self.world.slots.values():
                slot.finish_loading()
            steps = next_steps(PLAN, self.world.ledger, seen_of(self.world))
            if not steps:
                return
            for step in steps:
                self.world.do(step)
        raise AssertionError("not settled")


TestTwoGateways = TwoGateways.TestCase
TestTwoGateways.settings = settings(max_examples=share(200), stateful_step_count=40, deadline=None)
