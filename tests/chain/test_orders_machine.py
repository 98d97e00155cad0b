"""The model checker of the whole chain with standing orders: its operator dies and comes back at any moment, beside all else that befalls the chain.

To its laws comes one: an epoch's number stands for one plan and one key, whoever makes it.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.chain.ordered_world import SILENCE_SECONDS, OrderedWorld
from tests.chain.test_chain_machine import ChainMachine, moments, nodes, pods
from tests.laws import share


class OrderedMachine(ChainMachine):
    """One deployment of two replicas of two stages, whose plan has an order for the loss of each slot."""

    world: OrderedWorld
    world_of = OrderedWorld

    @rule()
    def the_operator_dies(self) -> None:
        self.world.operator_dies()

    @rule()
    def the_operator_returns(self) -> None:
        self.world.operator_returns()

    @rule(seconds=st.sampled_from([1.0, SILENCE_SECONDS, 25.0]))
    def the_operator_stays_away(self, seconds: float) -> None:
        self.world.operator_dies()
        self.world.passes(seconds, every=max(0.1, seconds / 20))

    @rule(
        pod=pods,
        for_good=st.booleans(),
        after=moments,
        until=st.sampled_from([0.2, 2.0, 5.2, 5.5, 5.8, 6.2, 7.0, 12.0]),
    )
    def a_slot_is_lost_meanwhile(self, pod: str, for_good: bool, after: float, until: float) -> None:  # noqa: FBT001
        """The operator returns at any moment of what is done about it."""
        self.the_operator_stays_away(SILENCE_SECONDS + 1.0)
        self.many_ask(3)
        self.world.passes(after, every=0.1)
        self.world.kill(pod, for_good=for_good)
        self.world.passes(until, every=0.1)
        self.world.operator_returns()

    @rule(pod=pods, node=nodes, apart=st.floats(0.0, 8.0))
    def two_are_lost_meanwhile(self, pod: str, node: str, apart: float) -> None:
        self.the_operator_stays_away(SILENCE_SECONDS + 1.0)
        self.world.kill(pod, for_good=True)
        self.world.passes(apart, every=0.1)
        self.world.node_goes(node, power=False)
        self.world.passes(12.0, every=0.5)

    @rule(pod=pods, seconds=st.sampled_from([2.0, 5.5, 6.5, 12.0]))
    def a_slot_is_cut_off_meanwhile(self, pod: str, seconds: float) -> None:
        """From everybody: it goes on as if it were in force."""
        self.the_operator_stays_away(SILENCE_SECONDS + 1.0)
        others = [name for name in (*self.world.cluster.hosts,) if name != pod]
        for other in others:
            self.world.part(pod, other, apart=True)
        self.world.passes(seconds, every=0.1)
        for other in others:
            self.world.part(pod, other, apart=False)


TestOrders = pytest.mark.timeout(900)(OrderedMachine.TestCase)
TestOrders.settings = settings(max_examples=share(16), stateful_step_count=8, deadline=None)


class LongLives(OrderedMachine):
    """The same, for longer."""


TestLongLives = pytest.mark.timeout(1800)(pytest.mark.slow(LongLives.TestCase))
TestLongLives.settings = settings(max_examples=share(16), stateful_step_count=30, deadline=None)
