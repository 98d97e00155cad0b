"""The model checker of the whole chain: whatever dies, hangs, is cut off or refuses, and in whatever order, no client sees a token twice, skipped or
wrong, and everything serves in the end.

Real are clients' way through two gateways (dispatcher, journal, links, kept answers and what gateways tell each other of them), leaders and followers with the engine,
slots with their epochs, how they prepare them and what they hand on, caches, all messages and keys, and the operator's controller; the cluster and its API server are the
operator's own model. Modelled: ZeroMQ (`virtual_zmq`), threads (`virtual_threads`), the arithmetic (`arithmetic`), disks. Time is virtual. The same laws have a machine each where they are decided: the journal, the engine, the epochs, the operator.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.chain.world import BEFALLS, ChainWorld
from tests.laws import share
from tests.operator.virtual_operator import FAULTS

NODES = ("a", "b", "c", "d")
GATEWAYS = ("chat-gateway-x", "chat-gateway-y")
nodes = st.sampled_from(NODES)
pods = st.sampled_from([f"chat-{node}-0" for node in NODES])
gateways = st.sampled_from(GATEWAYS)
BEGINNING = (9, 8, 7, 6, 5, 4, 3, 2, 1)  # which many prompts share: two blocks and a token
moments = st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.25, 0.7])


class ChainMachine(RuleBasedStateMachine):
    """One deployment of two replicas of two stages."""

    world_of: type[ChainWorld] = ChainWorld

    @initialize(seed=st.integers(0, 9), tight=st.booleans(), logged=st.sampled_from([0, 3, 64]))
    def begin(self, seed: int, tight: bool, logged: int) -> None:  # noqa: FBT001
        self.world = self.world_of(seed, tight=tight, logged=logged)
        self.world.passes(6)
        for number in range(3):
            self.world.ask((number, 5, 6), 40, number)
        for number in range(2):
            self.world.ask((*BEGINNING, number), 40, at=number)

    # What clients do.

    @rule(count=st.integers(1, 6))
    def many_ask(self, count: int) -> None:
        for number in range(count):
            self.world.ask((*BEGINNING, number), 40, number % 2, at=number)

    @rule(count=st.integers(1, 3), at=st.integers(0, 1))
    def some_ask_under_a_key(self, count: int, at: int) -> None:
        for number in range(count):
            self.world.ask((*BEGINNING, number), 40, at=at)

    @rule(number=st.integers(0, 9), at=st.integers(0, 1))
    def a_chat_goes_on(self, number: int, at: int) -> None:
        self.world.goes_on(number, at)

    @rule(number=st.integers(0, 9), at=st.integers(0, 1), forgets=st.booleans())
    def a_client_comes_back(self, number: int, at: int, forgets: bool) -> None:  # noqa: FBT001
        """To either gateway, behind what it has or for all of it."""
        self.world.comes_back(number, at, forgets=forgets)

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12), most=st.integers(1, 45), seed=st.integers(0, 2))
    def ask(self, prompt: list[int], most: int, seed: int) -> None:
        self.world.ask(tuple(prompt), most, seed)

    @rule(number=st.integers(0, 9))
    def a_client_leaves(self, number: int) -> None:
        self.world.leaves(number)

    # What passes.

    @rule(seconds=st.sampled_from([0.1, 0.7, 1.6, 4.0, 12.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.passes(seconds, every=max(0.1, seconds / 20))

    @rule(seconds=st.sampled_from([0.05, 0.5]))
    def time_passes_without_the_operator(self, seconds: float) -> None:
        self.world.cluster.time.passes(seconds)

    # What goes wrong.

    @rule(pod=pods, after=moments)
    def a_slot_is_killed(self, pod: str, after: float) -> None:
        self.world.cluster.time.passes(after)
        self.world.kill(pod)

    @rule(soon=pods, late=pods, seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def two_slots_are_killed_of_which_one_loads_for_long(self, soon: str, late: str, seconds: float) -> None:
        node = late.split("-")[1]
        self.world.cluster.faults.hangs.add(node)
        for pod in {soon, late}:
            self.world.kill(pod)
        self.world.passes(seconds, every=seconds / 20)
        self.world.cluster.faults.hangs.discard(node)

    @rule(pod=pods)
    def a_slot_is_gone_for_good(self, pod: str) -> None:
        self.world.kill(pod, for_good=True)

    @rule(pod=pods, stopped=st.booleans())
    def a_slot_is_stopped(self, pod: str, stopped: bool) -> None:  # noqa: FBT001
        self.world.stop(pod, stopped=stopped)

    @rule(pod=pods)
    def a_step_fails(self, pod: str) -> None:
        self.world.fail_step(pod)

    @rule(pod=pods)
    def a_step_hangs(self, pod: str) -> None:
        self.world.hang_step(pod)

    @rule(pod=pods, seconds=st.sampled_from([0.01, 0.05, 0.3, 2.0]))
    def steps_take_long(self, pod: str, seconds: float) -> None:
        self.world.slow_down(pod, seconds)

    @rule(one=st.sampled_from([*(f"chat-{node}-0" for node in NODES), *GATEWAYS]), other=pods, apart=st.booleans())
    def a_partition(self, one: str, other: str, apart: bool) -> None:  # noqa: FBT001
        self.world.part(one, other, apart=apart)

    @rule(apart=st.booleans())
    def the_gateways_are_parted(self, apart: bool) -> None:  # noqa: FBT001
        self.world.part(*GATEWAYS, apart=apart)

    @rule(gateway=gateways, pod=pods, seconds=st.sampled_from([0.5, 1.4, 2.0, 5.0]), busy=st.booleans())
    def a_gateway_cannot_reach_a_slot_for_a_while(self, gateway: str, pod: str, seconds: float, busy: bool) -> None:  # noqa: FBT001
        if busy:
            self.many_ask(4)
            self.world.passes(0.5, every=0.1)
        self.world.part(gateway, pod, apart=True)
        self.world.passes(seconds, every=0.1)
        self.world.part(gateway, pod, apart=False)

    @rule(node=nodes, befalls=st.sampled_from(["nothing", *BEFALLS]), whom=st.booleans(), after=moments)
    def pages_go_to_another_slot(self, node: str, befalls: str, whom: bool, after: float) -> None:  # noqa: FBT001
        """A node is left out and taken in again; something may befall whoever gives, or whoever gets them, while they go."""
        self.world.node_goes(node, power=False)
        self.world.passes(12.0, every=1.0)
        self.world.node_returns(node)
        self.many_ask(4)
        if self.world.until_pages_go(60.0) and befalls != "nothing":
            self.world.cluster.time.passes(after)
            self.world.befalls_pages(befalls, giver=whom)

    @rule(node=nodes)
    def a_node_is_lost_under_load(self, node: str) -> None:
        self.many_ask(4)
        self.world.passes(0.5, every=0.1)
        self.world.node_goes(node, power=False)
        self.world.passes(20.0, every=1.0)

    @rule(node=nodes, power=st.booleans())
    def a_node_goes_away(self, node: str, power: bool) -> None:  # noqa: FBT001
        self.world.node_goes(node, power=power)

    @rule(node=nodes)
    def a_node_falls_silent(self, node: str) -> None:
        self.world.node_falls_silent(node)

    @rule(node=nodes)
    def a_node_comes_back(self, node: str) -> None:
        self.world.node_returns(node)

    @rule(gateway=gateways)
    def a_gateway_is_killed(self, gateway: str) -> None:
        self.world.kill(gateway)

    @rule(node=nodes, what=st.sampled_from(["refuses", "hangs", "mute", "unreachable"]), wrong=st.booleans())
    def slots_of_a_node_fail(self, node: str, what: str, wrong: bool) -> None:  # noqa: FBT001
        failing: set[str] = getattr(self.world.cluster.faults, what)
        failing.add(node) if wrong else failing.discard(node)

    @rule(bits=st.sampled_from([4, 8, 16]))
    def the_spec_is_edited(self, bits: int) -> None:
        self.world.cluster.edit("chat", precision={"allowed": [bits]})

    @rule()
    def the_operator_starts_anew(self) -> None:
        self.world.operator_starts_anew()

    @rule(
        faults=st.lists(st.sampled_from((None, None, *FAULTS)), min_size=1, max_size=8),
        of=st.sampled_from(["reads", "writes", "all"]),
    )
    def the_api_server_fails(self, faults: list[Any], of: Any) -> None:
        self.world.api.coming, self.world.api.of = faults, of

    @invariant()
    def the_laws_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Nothing more goes wrong: everybody is answered."""
        if not hasattr(self, "world"):
            return
        try:
            self.world.heal()
            self.world.settle()
        finally:
            self.world.close()


TestChain = pytest.mark.timeout(900)(ChainMachine.TestCase)
TestChain.settings = settings(max_examples=share(40, 20), stateful_step_count=20, deadline=None)


class LongLives(ChainMachine):
    """The same, for longer."""


TestLongLives = pytest.mark.timeout(1800)(pytest.mark.slow(LongLives.TestCase))
TestLongLives.settings = settings(max_examples=share(20), stateful_step_count=40, deadline=None)
