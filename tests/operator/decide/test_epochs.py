"""Laws of the epochs under crashes, restarts, false alarms and new plans in any order, and whole lives by name."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_operator.decide.epochs import (
    CreateEpoch,
    Epoch,
    Ledger,
    Observed,
    PlanWithout,
    RecordCommit,
    SendToGateway,
    SendToSlot,
    Step,
    is_ready,
    next_steps,
    slots_of,
    unheard,
)
from strata_operator.decide.formation import places_by_replica, runs
from strata_operator.decide.parts import parts_of, waiting
from strata_planner.contract.control import Commit, HungStep, Prepare, PrepareState, encode
from strata_planner.contract.keys import request_secret
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import roles_of
from tests.laws import share
from tests.operator.fakes import FakeGateway, FakeSlot, RunningRole, a_plan, addresses_of, replicas_of

SLOTS = ("a", "b", "c")
TWO = replicas_of(a_plan("a", "b"), a_plan("c"))
SHARED = replicas_of(a_plan("a", "b"), a_plan("b", "c"))
PLANS = (
    *(a_plan("a", "b"), a_plan("b", "a"), a_plan("a", "b", "c"), a_plan("c"), a_plan("a", "b", bits=8)),
    *(TWO, SHARED, replicas_of(a_plan("a", "b", bits=8), a_plan("c"))),
    replicas_of(a_plan("a", "b", bits=8), a_plan("c", bits=8)),
)


class World:
    """Slots, a gateway and the controller's record; `do` carries out one step as a shell would."""

    def __init__(self, desired: Plan) -> None:
        self.desired = desired
        self.slots = {name: FakeSlot(name) for name in SLOTS}
        self.gateway = FakeGateway()
        self.up = set(SLOTS)
        self.ledger = Ledger()
        self.numbers: list[int] = []

    def seen(self) -> Observed:
        return Observed(
            slots={name: slot.status() for name, slot in self.slots.items() if name in self.up},
            gateways={"gateway": self.gateway.status()},
            addresses=addresses_of(*SLOTS),
        )

    def roles_of(self, plan: Plan, replica: int) -> list[RunningRole]:
        """As its slots run them."""
        places = places_by_replica(plan)[replica]
        return [self.slots[slot].running[place] for slot, place in places]

    def formed(self) -> dict[int, int]:
        """Replica -> the epoch that all its slots have it from."""
        assert self.ledger.newest is not None
        plan, formed = self.ledger.newest.plan, {}
        for replica in places_by_replica(plan):
            (formed[replica],) = {each.formed for each in self.roles_of(plan, replica)}
        return formed

    def steps(self) -> tuple[Step, ...]:
        return next_steps(self.desired, self.ledger, self.seen())

    def do(self, step: Step) -> None:
        match step:
            case CreateEpoch(number=number, plan=plan):
                self.numbers.append(number)
                self.ledger = self.ledger.with_newest(Epoch(number, f"key-{number}", plan, step.formations))
            case RecordCommit(number=number):
                self.ledger = self.ledger.with_commit(number)
            case SendToSlot(slot=slot, message=message):
                if slot in self.up:
                    self.slots[slot].handle(message)
            case SendToGateway(message=route):
                self.gateway.handle(route)
            case PlanWithout(slot=slot):
                self.slots[slot].refuses = ""
                self.desired = a_plan(*(set(SLOTS) - {slot}))

    def settle(self) -> None:
        """Everybody is back and loads; the controller goes on until it has nothing to do."""
        for name in set(SLOTS) - self.up:
            self.slots[name].restart()
        self.up = set(SLOTS)
        for _ in range(50):
            for slot in self.slots.values():
                slot.finish_loading()
            steps = self.steps()
            if not steps:
                return
            for step in steps:
                self.do(step)
        raise AssertionError(f"not settled: {self.steps()}")


class Epochs(RuleBasedStateMachine):
    """Any interleaving of the controller's steps with what can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(PLANS[0])
        self.late: list[Step] = []

    @rule()
    def the_controller_acts(self) -> None:
        for step in self.world.steps():
            self.check(step)
            self.world.do(step)

    @rule()
    def a_message_is_delayed(self) -> None:
        self.late += [step for step in self.world.steps() if isinstance(step, SendToSlot | SendToGateway)]

    @precondition(lambda self: self.late)
    @rule()
    def a_late_message_arrives(self) -> None:
        self.world.do(self.late.pop())

    @rule(slot=st.sampled_from(SLOTS))
    def loaded(self, slot: str) -> None:
        self.world.slots[slot].finish_loading()

    @rule(slot=st.sampled_from(SLOTS))
    def dies(self, slot: str) -> None:
        self.world.up.discard(slot)

    @rule(slot=st.sampled_from(SLOTS))
    def is_started(self, slot: str) -> None:
        self.world.slots[slot].restart()
        self.world.up.add(slot)

    @rule(slot=st.sampled_from(SLOTS), peer=st.sampled_from(SLOTS))
    def loses_a_peer(self, slot: str, peer: str) -> None:
        self.world.slots[slot].lose(peer)

    @rule(slot=st.sampled_from(SLOTS))
    def fails(self, slot: str) -> None:
        if self.world.slots[slot].committed:
            self.world.slots[slot].failure = "out of memory"

    @rule(slot=st.sampled_from(SLOTS), place=st.sampled_from([0, 1]))
    def a_role_fails(self, slot: str, place: int) -> None:
        if place in self.world.slots[slot].running:
            self.world.slots[slot].running[place].failure = "a step failed"

    @rule(slot=st.sampled_from(SLOTS))
    def will_refuse(self, slot: str) -> None:
        self.world.slots[slot].refuses = "too little memory"

    @rule()
    def the_gateway_is_started_anew(self) -> None:
        self.world.gateway.restart()

    @rule(plan=st.sampled_from(PLANS))
    def another_plan_is_wanted(self, plan: Plan) -> None:
        self.world.desired = plan

    @rule()
    def records_are_lost(self) -> None:
        self.world.ledger = Ledger()

    def check(self, step: Step) -> None:
        newest = self.world.ledger.newest
        if isinstance(step, CreateEpoch):
            for each in step.formations:
                for slot, place in places_by_replica(step.plan)[each.replica]:
                    running = self.world.slots[slot].running.get(place)
                    says = running is not None and running.formed == each.epoch and not running.failure
                    assert says or slot not in self.world.up, "who answers runs what is to go on"
        if isinstance(step, SendToSlot) and isinstance(step.message, Commit):
            assert newest is not None
            assert step.message.epoch == newest.number == self.world.ledger.committed
            (part,) = (part for part in parts_of(newest.plan) if step.slot in part)
            assert all(step.message.epoch in self.world.slots[slot].ever_prepared for slot in part)
        if isinstance(step, SendToSlot) and isinstance(step.message, Prepare):
            assert step.slot in step.message.slots
            assert self.world.ledger.committed < step.message.epoch
        if isinstance(step, RecordCommit):
            assert newest is not None
            prepared = {slot for slot in SLOTS if step.number in self.world.slots[slot].ever_prepared}
            assert any(part <= prepared for part in parts_of(newest.plan))
            for replica in self.served():  # nobody who serves is stopped by it, unless all pass into it at once
                members = {slot for slot, _ in places_by_replica(newest.plan).get(replica, {})}
                goes_on = any(each.replica == replica for each in newest.formations) and members <= prepared
                assert goes_on or slots_of(newest.plan) <= prepared
        if isinstance(step, SendToGateway):
            assert newest is not None
            led = places_by_replica(newest.plan)
            whole = {leader.replica for leader in step.message.leaders if self.is_whole(newest.plan, leader.replica)}
            assert whole
            assert all(self.world.slots[slot].committed == newest.number for each in whole for slot, _ in led[each])
            for leader in (each for each in step.message.leaders if each.replica in whole):
                formed = leader.formed or step.message.epoch
                running = self.world.roles_of(newest.plan, leader.replica)
                assert {each.formed for each in running} == {formed}
                assert (leader.key or step.message.key) == request_secret(f"key-{formed}")

    def served(self) -> set[int]:
        """Replicas of the epoch in force all of whose slots run them, and have lost nobody."""
        before = self.world.ledger.in_force
        if before is None:
            return set()
        return {
            replica
            for replica, places in places_by_replica(before.plan).items()
            if self.is_whole(before.plan, replica) and runs(places, before.formed_in(replica), self.world.seen().slots)
        }

    def is_whole(self, plan: Plan, replica: int) -> bool:
        return {slot for slot, _ in places_by_replica(plan)[replica]} <= self.world.up

    @invariant()
    def numbers_only_rise_for_a_process(self) -> None:
        for slot in self.world.slots.values():
            assert slot.ever_committed == sorted(set(slot.ever_committed))

    def teardown(self) -> None:
        """What is wanted is served in the end, by all, and then nothing more is sent."""
        for slot in self.world.slots.values():
            slot.refuses = ""
        self.world.settle()
        newest = self.world.ledger.newest
        assert newest is not None
        assert newest.plan == self.world.desired
        assert all(self.world.slots[slot].committed == newest.number for slot in slots_of(newest.plan))
        assert is_ready(self.world.desired, self.world.ledger, self.world.seen())
        assert self.world.formed() == {each.replica: newest.formed_in(each.replica) for each in newest.plan.replicas}


Epochs.TestCase.settings = settings(max_examples=share(150), stateful_step_count=30, deadline=None)
TestEpochs = Epochs.TestCase


def test_the_first_epoch_step_by_step() -> None:
    world = World(a_plan("a", "b"))

    def names() -> list[str]:
        steps = world.steps()
        for step in steps:
            world.do(step)
        return [_name(step) for step in steps]

    assert names() == ["create 1: there is no epoch yet"]
    assert names() == ["prepare 1 at a", "prepare 1 at b"]
    assert names() == []  # both load
    world.slots["a"].finish_loading()
    assert names() == []
    world.slots["b"].finish_loading()
    assert names() == ["record 1"]
    assert names() == ["commit 1 at a", "commit 1 at b"]
    assert names() == ["route 1 at gateway"]
    assert names() == []
    assert is_ready(world.desired, world.ledger, world.seen())


def test_a_slot_that_was_started_anew_gets_a_new_epoch_of_the_same_plan() -> None:
    world = World(a_plan("a", "b"))
    world.settle()
    world.up.discard("b")
    world.slots["a"].lose("b")
    assert world.steps() == ()  # b is away: it could not prepare
    world.slots["b"].restart()
    world.up.add("b")
    assert [_name(step) for step in world.steps()] == ["create 2: slot a lost its neighbour b: connection closed"]
    world.settle()
    assert world.slots["a"].committed == world.slots["b"].committed == 2


def test_whom_nobody_hears_is_known_by_its_neighbours_or_by_who_speaks_with_leaders() -> None:
    world = World(TWO)
    world.settle()

    def unheard_without(*away: str) -> set[str]:
        world.up = set(SLOTS) - set(away)
        return unheard(world.ledger, world.seen())

    assert unheard_without("b", "c") == set()  # they do not answer, and may only be busy
    world.slots["a"].lose("b")
    assert unheard_without() == set()  # a false alarm: it answers
    assert unheard_without("b", "c") == {"b"}
    world.gateway.lost.add("c")
    assert unheard_without("c") == {"c"}
    world.desired = a_plan("a", "b")
    world.do(world.steps()[0])
    assert unheard_without("b", "c") == set()  # the next epoch is prepared: who waits for it may be busy with it


def test_a_gateway_that_is_started_anew_serves_the_replicas_that_are_whole() -> None:
    world = World(TWO)
    world.settle()
    world.up.discard("c")
    world.gateway.restart()
    assert [_name(step) for step in world.steps()] == ["route 1 at gateway"]
    world.do(world.steps()[0])
    assert world.steps() == ()
    assert not is_ready(world.desired, world.ledger, world.seen())
    world.up = {"a", "c"}
    world.gateway.restart()
    assert [_name(step) for step in world.steps()] == ["route 1 at gateway"]
    world.up.discard("c")
    assert world.steps() == ()  # no replica is whole


def test_a_lost_slot_costs_its_own_replica_alone() -> None:
    world = World(TWO)
    world.settle()
    world.slots["b"].restart()
    world.slots["a"].lose("b")
    world.settle()
    assert world.formed() == {0: 2, 1: 1}
    assert world.gateway.route is not None
    of_a, of_c = world.gateway.route.leaders
    assert (of_a.formed, of_a.key, of_c.formed, of_c.key) == (0, "", 1, request_secret("key-1"))
    world.slots["c"].running[0].failure = "out of memory"
    world.settle()
    assert world.formed() == {0: 2, 1: 3}
    assert world.gateway.route.leaders[0].key == request_secret("key-2")


def lost_at_once(*away: str) -> World:
    """Slots of both replicas, which are all started again but those that stay away."""
    world = World(TWO)
    world.settle()
    for slot in ("b", "c"):
        world.slots[slot].restart()
    world.slots["a"].lose("b")
    world.up -= set(away)
    return world


def carried_out(world: World, *loaded: str) -> list[str]:
    """All steps until there are none; only these load."""
    done, steps = [], world.steps()
    while True:
        for step in steps:
            world.do(step)
            done.append(_name(step))
        for slot in loaded:
            world.slots[slot].finish_loading()
        if not (steps := world.steps()):
            return done


def test_a_replica_waits_for_no_slot_of_another_one() -> None:
    world = lost_at_once()
    assert carried_out(world, "a", "b") == [
        "create 2: slot a lost its neighbour b: connection closed",
        *("prepare 2 at a", "prepare 2 at b", "prepare 2 at c"),
        *("record 2", "commit 2 at a", "commit 2 at b", "route 2 at gateway"),
    ]
    assert world.ledger.newest is not None
    assert waiting(world.ledger.newest, world.seen().slots) == {"c"}
    assert world.gateway.status().replicas == (0,)
    assert not is_ready(world.desired, world.ledger, world.seen())
    assert carried_out(world, "c") == ["commit 2 at c", "route 2 at gateway"]  # which learns of one more
    assert world.gateway.status().replicas == (0, 1)
    assert is_ready(world.desired, world.ledger, world.seen())
    assert world.formed() == {0: 2, 1: 2}


def test_a_replica_waits_for_no_slot_of_another_one_that_is_away() -> None:
    world = lost_at_once("c")
    assert carried_out(world, "a", "b")[-1] == "route 2 at gateway"
    assert world.gateway.status().leaders_connected
    world.up.add("c")
    assert carried_out(world, *SLOTS)[0] == "create 3: slot c was started anew"
    assert world.formed() == {0: 2, 1: 3}


def test_who_serves_unheard_by_its_controller_alone_goes_on_over_the_epoch_of_another_replica() -> None:
    """It is led to as before, and heard again it is of the next epoch as it was formed."""
    world = World(replicas_of(a_plan("c"), a_plan("a", "b")))
    world.settle()
    world.up.discard("b")
    world.slots["c"].restart()
    carried_out(world, *SLOTS)
    assert world.gateway.route is not None
    leaders = {leader.replica: leader.formed for leader in world.gateway.route.leaders}
    assert (world.gateway.route.epoch, leaders) == (2, {0: 0, 1: 1})
    assert (world.slots["a"].committed, world.slots["c"].committed) == (1, 2)
    world.up.add("b")
    assert carried_out(world, *SLOTS)[0] == "create 3: slot b was not heard when it was prepared"
    assert world.formed() == {0: 2, 1: 1}


def test_nobody_is_missed_because_another_replica_loads() -> None:
    """Gateways are told of those that serve, and have reached these: whom only the controller does not hear is not accused, nor who loads."""
    world = lost_at_once()
    carried_out(world, "a", "b")
    for silent in ("a", "c"):
        world.up.discard(silent)
        assert carried_out(world) == []
        assert unheard(world.ledger, world.seen()) == set()
        world.up.add(silent)
    world.gateway.lost.add("a")
    world.up.discard("a")
    assert unheard(world.ledger, world.seen()) == {"a"}


def test_who_waits_for_a_slot_that_hangs_says_so() -> None:
    """Its replica goes on from before, over the epoch of another one."""
    world = World(replicas_of(a_plan("c"), a_plan("a", "b")))
    world.settle()
    world.up.discard("b")
    world.slots["c"].restart()
    carried_out(world, *SLOTS)
    assert unheard(world.ledger, world.seen()) == set()
    world.slots["a"].lose("b")
    assert unheard(world.ledger, world.seen()) == {"b"}
    world.slots["a"].lost = ()
    world.slots["a"].overdue = (HungStep(1, 0, "no word"),)
    assert unheard(world.ledger, world.seen()) == {"b"}


def test_beside_a_gateway_of_an_earlier_release_all_replicas_begin_at_once() -> None:
    """It takes one route of an epoch."""
    world = lost_at_once()
    world.gateway.protocol = 0
    assert "record 2" not in carried_out(world, "a", "b")
    assert carried_out(world, *SLOTS)[-1] == "route 2 at gateway"
    assert world.gateway.status().leaders_connected == 2
    world = lost_at_once()
    carried_out(world, "a", "b")
    world.gateway.restart()
    world.gateway.protocol = 0  # taken back meanwhile
    assert carried_out(world) == []
    assert carried_out(world, *SLOTS)[-1] == "route 2 at gateway"


def test_a_replica_joins_while_a_slot_of_another_one_is_away() -> None:
    world = World(replicas_of(a_plan("a", "b"), a_plan("c")))
    carried_out(world, "a", "b")
    world.up.discard("a")
    world.slots["b"].restart()
    assert carried_out(world, "c") == ["commit 1 at c", "route 1 at gateway"]
    assert world.gateway.status().replicas == (0, 1)


def test_the_first_replica_that_has_loaded_serves() -> None:
    world = World(TWO)
    assert carried_out(world, "c")[-3:] == ["record 1", "commit 1 at c", "route 1 at gateway"]
    assert carried_out(world, "a") == []
    world.settle()
    assert set(world.gateway.status().replicas) == {0, 1}


def test_who_never_served_and_does_not_answer_is_waited_for() -> None:
    """Whether it is slow to start or lost is for others to say: it is of no epoch in force that could be repaired."""
    world = World(TWO)
    world.up.discard("b")
    assert carried_out(world, *SLOTS) == ["create 1: there is no epoch yet", "prepare 1 at a", "prepare 1 at c"]


def test_what_serves_goes_on_until_all_of_a_changed_plan_have_loaded() -> None:
    world = World(TWO)
    world.settle()
    world.desired = replicas_of(a_plan("a", "b", bits=8), a_plan("c", bits=8))
    assert "record 2" not in carried_out(world, "c")
    assert carried_out(world, *SLOTS)[0] == "record 2"
    assert world.formed() == {0: 2, 1: 2}


def test_pages_from_another_part_are_given_as_all_pass_into_the_epoch() -> None:
    world = World(a_plan("a", "b"))
    world.settle()
    world.slots["a"].restart()
    world.slots["b"].lose("a")
    world.desired = replicas_of(a_plan("a", "c"), a_plan("b"))
    assert "record 2" not in carried_out(world, "b")
    assert [source.slot for source in world.slots["c"].asked.sources] == ["b"]  # type: ignore[union-attr]
    world.settle()


def test_a_slot_that_refuses_while_others_serve_is_named() -> None:
    world = lost_at_once()
    carried_out(world, "a", "b")
    world.slots["c"].prepare = PrepareState(epoch=2, phase="refused", reason="too little memory")
    assert world.steps() == (PlanWithout("c", "too little memory"),)


def test_a_slot_of_two_replicas_keeps_the_one_that_lost_nobody() -> None:
    world = World(SHARED)
    world.settle()
    kept = world.slots["b"].running[1]
    world.slots["a"].restart()
    world.slots["b"].lose("a")
    world.settle()
    assert world.formed() == {0: 2, 1: 1}
    assert world.slots["b"].running[1] is kept
    assert world.slots["b"].lost == ()


def test_a_replica_that_another_plan_leaves_alone_goes_on_and_a_changed_one_does_not() -> None:
    world = World(TWO)
    world.settle()
    world.desired = replicas_of(a_plan("a", "b", bits=8), a_plan("c"))
    world.settle()
    assert world.formed() == {0: 2, 1: 1}
    world.desired = a_plan("a", "b")
    world.settle()
    assert world.formed() == {0: 3}


def test_a_replica_goes_on_from_what_is_in_force_over_an_epoch_that_was_never_committed() -> None:
    world = World(TWO)
    world.settle()
    world.desired = replicas_of(a_plan("a", "b", bits=8), a_plan("c"))
    (create,) = world.steps()
    world.do(create)
    world.desired = TWO
    world.settle()
    assert world.formed() == {0: 1, 1: 1}
    assert world.numbers == [1, 2, 3]


def test_a_slot_lost_while_its_replica_was_to_go_on_supersedes_the_change() -> None:
    world = World(TWO)
    world.settle()
    world.slots["b"].restart()
    (create,) = world.steps()
    world.do(create)
    decided = world.steps()
    world.slots["c"].restart()  # nobody has seen it yet
    for step in decided:
        world.do(step)
    assert world.slots["c"].prepare.epoch == 0
    (create,) = world.steps()
    assert _name(create) == "create 3: replica 1 was to go on from epoch 1 and does not run as it did"
    world.settle()
    assert world.formed() == {0: 3, 1: 3}


def test_what_a_slot_of_an_earlier_release_runs_is_formed_anew() -> None:
    world = World(TWO)
    world.settle()
    world.slots["c"].running[0].formed = 0  # it says nothing of it
    world.slots["b"].restart()
    world.settle()
    assert world.formed() == {0: 2, 1: 2}


def test_a_refused_prepare_names_slot_and_reason_and_leaves_the_old_epoch_alone() -> None:
    world = World(a_plan("a", "b"))
    world.settle()
    world.desired = a_plan("a", "b", "c")
    world.slots["c"].refuses = "needs 9 GiB, has 8"
    for _ in range(3):
        for step in world.steps():
            if not isinstance(step, PlanWithout):
                world.do(step)
    assert world.steps() == (PlanWithout("c", "needs 9 GiB, has 8"),)
    assert world.slots["a"].committed == world.slots["b"].committed == 1


def test_a_gateway_that_was_started_anew_learns_the_route() -> None:
    world = World(a_plan("a", "b"))
    world.settle()
    world.gateway.restart()
    assert [_name(step) for step in world.steps()] == ["route 1 at gateway"]


def told(world: World) -> dict[str, Prepare]:
    """What each slot is told to prepare in the first epoch."""
    (create,) = world.steps()
    world.do(create)
    sent = [step for step in world.steps() if isinstance(step, SendToSlot)]
    return {step.slot: step.message for step in sent if isinstance(step.message, Prepare)}


def test_neighbours_are_told_the_keys_of_their_ports_and_nobody_the_epochs() -> None:
    world = World(a_plan("a", "b", "c"))
    prepares = told(world)
    keys = {slot: prepare.role_keys[0] for slot, prepare in prepares.items()}
    assert keys["a"].own == keys["c"].next == keys["b"].previous
    assert len({each.own for each in keys.values()} | {prepares["a"].key}) == 4
    assert world.ledger.newest is not None
    assert all(world.ledger.newest.key.encode() not in encode(prepare) for prepare in prepares.values())
    world.settle()
    assert world.gateway.route is not None
    assert world.gateway.route.key == prepares["a"].key


def test_beside_a_slot_of_0_1_0_all_are_told_what_it_can_read() -> None:
    world = World(a_plan("a", "b"))
    world.slots["b"].protocol = 0
    prepares = told(world)
    known = {"type", "epoch", "key", "roles", "slots"}
    assert [msgspec.json.decode(encode(prepare)).keys() for prepare in prepares.values()] == [known | {"steps"}, known]


def test_a_leader_is_reached_at_its_slots_request_port_and_place() -> None:
    world = World(a_plan("b", "a"))
    world.settle()
    assert world.gateway.route is not None
    (leader,) = world.gateway.route.leaders
    assert (leader.slot, leader.endpoint) == ("b", "tcp://b:7200")
    assert msgspec.json.decode(msgspec.json.encode(world.gateway.route))["maxModelLen"] == 64


def test_unequal_replicas_are_weighed_by_what_they_let_through() -> None:
    quick = a_plan("a")
    slow_stage = quick.replicas[0].stages[0]
    times = msgspec.structs.replace(slow_stage.times, decode_seconds=0.004)
    slow_stage = msgspec.structs.replace(slow_stage, slot="b", node="b", times=times)
    slow = msgspec.structs.replace(quick.replicas[0], replica=1, stages=(slow_stage,))
    world = World(msgspec.structs.replace(quick, replicas=(*quick.replicas, slow)))
    world.settle()
    assert world.gateway.route is not None
    rates = {leader.slot: leader.tokens_per_second for leader in world.gateway.route.leaders}
    assert rates["a"] == 4 * rates["b"]


def _name(step: Step) -> str:
    match step:
        case CreateEpoch():
            return f"create {step.number}: {step.reason}"
        case RecordCommit():
            return f"record {step.number}"
        case SendToSlot():
            return f"{type(step.message).__name__.lower()} {step.message.epoch} at {step.slot}"
        case SendToGateway():
            return f"route {step.message.epoch} at {step.gateway}"
        case PlanWithout():
            return f"without {step.slot}: {step.reason}"


def prepares(world: World) -> dict[str, Prepare]:
    sent = [step for step in world.steps() if isinstance(step, SendToSlot)]
    return {step.slot: step.message for step in sent if isinstance(step.message, Prepare)}


def drained(before: Plan, after: Plan) -> World:
    """Before the new epoch's prepares are sent."""
    world = World(before)
    world.settle()
    world.desired = after
    (create,) = world.steps()
    assert isinstance(create, CreateEpoch)
    world.do(create)
    return world


def test_who_leaves_is_told_to_give_its_pages_and_who_gets_its_layers_where_they_are() -> None:
    world = drained(a_plan("a", "b"), a_plan("a", "c"))
    told = prepares(world)
    assert set(told) == {"a", "b", "c"}
    (source,) = told["c"].sources
    giving = told["b"].giving
    assert giving is not None
    assert (source.slot, source.endpoint, source.key) == ("b", "tcp://b:7300", giving.key)
    first, last = roles_of(a_plan("a", "b"))["b"][0].layers
    assert source.layers == tuple(range(first, last + 1))
    assert (told["b"].roles, giving.port, giving.takers) == ((), 7300, 1)
    assert (told["a"].sources, told["a"].giving) == ((), None)
    world.settle()
    assert {name: slot.committed for name, slot in world.slots.items()} == dict.fromkeys("abc", 2)
    assert world.gateway.status().epoch == 2


def test_nobody_waits_for_who_leaves() -> None:
    """It dies before the commit, or does not load: the others are committed and routed to."""
    world = drained(a_plan("a", "b"), a_plan("a", "c"))
    for step in world.steps():
        world.do(step)
    world.up -= {"b"}
    for name in "ac":
        world.slots[name].finish_loading()
    while steps := world.steps():
        for step in steps:
            world.do(step)
    assert (world.slots["a"].committed, world.slots["c"].committed, world.gateway.status().epoch) == (2, 2, 2)
    world.up |= {"b"}
    world.settle()


def test_a_slot_of_an_earlier_release_gets_no_orders_for_pages() -> None:
    world = drained(a_plan("a", "b"), a_plan("a", "c"))
    world.slots["c"].protocol = 1
    told = prepares(world)
    assert set(told) == {"a", "c"}
    assert not any(each.sources or each.giving for each in told.values())


def test_replicas_that_go_on_give_and_get_nothing() -> None:
    world = drained(replicas_of(a_plan("a"), a_plan("b")), replicas_of(a_plan("a"), a_plan("c")))
    told = prepares(world)
    assert [source.slot for source in told["c"].sources] == ["b"]
    assert (told["a"].sources, told["a"].giving) == ((), None)
