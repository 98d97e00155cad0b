"""A gateway that has standing orders: it looks at slots only while no controller is heard, and counts what it has carried out."""

from collections.abc import Mapping

from strata_planner.contract.control import (
    CarryOut,
    CommitOrder,
    OrderedEpoch,
    OrderRequest,
    PeerLoss,
    PrepareState,
    SetOrders,
    SetRoute,
    SlotDoor,
    SlotStatus,
)
from strata_runtime.gateway.metrics import Load, Metrics
from strata_runtime.gateway.standing.carrying import OrderCarrier

NUMBER = 4


class Slots:
    """One that is left of two, and takes whatever it is told; the other answers nobody."""

    def __init__(self) -> None:
        self.asked: list[OrderRequest] = []
        self.opened = self.closed = 0
        self.committed, self.prepared = 1, 1

    def made(self, _: Mapping[str, SlotDoor]) -> "Slots":
        self.opened += 1
        return self

    async def ask(self, slot: str, message: OrderRequest) -> SlotStatus | None:
        if slot == "b":
            return None
        self.asked.append(message)
        if isinstance(message, CarryOut):
            self.prepared = NUMBER
        if isinstance(message, CommitOrder):
            self.committed = message.epoch
        lost = (PeerLoss("b", "gone"),) if self.committed == 1 else ()
        return SlotStatus("a", "life", self.committed, PrepareState(self.prepared, "prepared"), lost, 0, 0, ())

    def close(self) -> None:
        self.closed += 1


class Route:
    """In place of a dispatcher."""

    epoch = 1

    def set_route(self, route: SetRoute) -> None:
        self.epoch = route.epoch


def orders(silence_seconds: float) -> SetOrders:
    words = CarryOut(1, silence_seconds, "{}", "seal")
    order = OrderedEpoch(NUMBER, {"a": words}, SetRoute(NUMBER, "key", (), 64), lost=("b",))
    doors = {name: SlotDoor("127.0.0.1", 1, "public", "secret") for name in ("a", "b")}
    return SetOrders(1, 5, silence_seconds, 0.0, {0: ("a", "b")}, doors, (order,))


async def test_a_lost_slot_is_done_without_step_by_step() -> None:
    slots, route, metrics = Slots(), Route(), Metrics("model")
    carrier = OrderCarrier(route, metrics.order_done, slots.made)
    carrier.take(orders(silence_seconds=0.0))
    for _ in range(4):
        await carrier.look()
    told = [type(message) for message in slots.asked if isinstance(message, CarryOut | CommitOrder)]
    assert told == [CarryOut, CommitOrder]
    assert route.epoch == NUMBER
    page = metrics.render(Load(0, 0, 0.0, NUMBER, 0)).decode()
    assert 'strata_standing_orders_total{kind="takeover",model_name="model"} 1.0' in page
    await carrier.close()
    assert (slots.opened, slots.closed) == (1, 1)


async def test_nobody_is_asked_while_a_controller_is_heard_nor_after_it_is_back() -> None:
    slots = Slots()
    carrier = OrderCarrier(Route(), doors=slots.made)
    carrier.take(orders(silence_seconds=60.0))
    await carrier.look()
    assert not slots.opened
    carrier._heard -= 61.0
    await carrier.look()
    assert slots.opened
    carrier.hear()
    before = len(slots.asked)
    await carrier.look()
    assert len(slots.asked) == before
    assert slots.closed == 1
    await carrier.close()


async def test_orders_of_an_epoch_that_is_over_are_not_taken() -> None:
    slots = Slots()
    carrier = OrderCarrier(Route(), doors=slots.made)
    carrier.take(orders(silence_seconds=0.0))
    old = orders(silence_seconds=0.0)
    carrier.take(SetOrders(0, 3, 0.0, 0.0, {}, {}, ()))
    assert carrier._orders == old
    await carrier.close()
