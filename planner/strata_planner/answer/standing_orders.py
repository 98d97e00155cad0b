"""A plan's standing orders, as people read them: a row for each loss, with what is done about it while nobody controls the deployment."""

from rich.table import Table

from strata_planner.contract.plan import Plan, StandingOrder
from strata_planner.units import human_bytes

_DONE = {
    "neighbours": "neighbours take over",
    "reshuffle": "all that are left take over",
    "spareDevices": "devices that serve nothing take over",
    "fewerSequences": "those that are left take over, for fewer requests at once",
    "withoutReplica": "the other replicas go on",
}


def order_table(plan: Plan) -> Table:
    table = Table(
        title="standing orders: what gateways and slots do by themselves while no controller is there",
        title_justify="left",
    )
    table.add_column("lost")
    table.add_column("done", overflow="fold")
    for column in ("layers moved", "of fewer bits", "loaded", "tokens/s", "of now"):
        table.add_column(column, justify="right")
    for order in plan.orders or ():
        table.add_row(
            ", ".join(order.lost),
            _done(order),
            str(order.layers_moved),
            str(order.bits_lowered),
            human_bytes(order.loaded_bytes),
            f"{order.prediction.tokens_per_second:.1f}",
            f"{order.kept_share:.0%}",
        )
    table.caption = "a slot that is only started anew gets its part again"
    table.caption_justify = "left"
    return table


def _done(order: StandingOrder) -> str:
    """`neighbours take over: a layers 0-5, b layers 6-11`."""
    stages = [
        f"{stage.slot} layers {stage.layers[0]}-{stage.layers[1]}" for each in order.replicas for stage in each.stages
    ]
    done = _DONE.get(order.kind, order.kind)
    return f"{done}: {', '.join(stages)}" if stages else done
