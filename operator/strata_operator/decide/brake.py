"""Which nodes of the plan are lost, which are about to go, and when so many are away at once that none is believed lost.

Called by wishes and report. Pure. A false alarm that is believed costs every slot its KV and its node; one that is not believed
costs a wait: so losses are believed slowly (the grace period) where Kubernetes alone tells of them, at once where those who worked with a node and the
operator itself agree, and many at once not at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

from strata_operator.decide.silence import silent_nodes
from strata_operator.decide.view import NodeView, View
from strata_operator.once import Same

AT_LEAST = 2  # nodes away before the share of them is looked at: the only node of a plan may be lost


@dataclass(frozen=True, slots=True)
class Losses:
    """`lost`: nodes of the plan to do without, by name; `silent`: those of them of which Kubernetes knows nothing yet. `braked`: why nodes that are away do not
    count; empty: they do.
    """

    lost: tuple[str, ...]
    braked: str = ""
    silent: frozenset[str] = frozenset()


def losses(view: View) -> Losses:
    """Nodes of the plan that are gone, that nobody reaches any more, or that are not Ready for longer than the grace period and silent: a slot that answers
    its controller is not lost, whatever the node's condition says.
    """
    silent = {stage.node for stage in view.stages() if not view.answers(stage.slot)}
    gone = {node for node in silent if node not in view.nodes}
    unreached = silent_nodes(view)
    overdue = {node for node in silent - gone if is_overdue(view, node)} | unreached
    braked = _braked(view, unreached) if overdue else ""
    if braked:
        return Losses(tuple(sorted(gone)), braked)
    return Losses(
        tuple(sorted(gone | overdue)), silent=frozenset(each for each in unreached if not view.nodes[each].away_since)
    )


def cordoned(view: View) -> tuple[str, ...]:
    """Nodes of the plan that take no further pods: a drain starts so."""
    return tuple(sorted({stage.node for stage in view.stages() if _is_cordoned(view, stage.node)}))


def closed(view: View) -> frozenset[str]:
    """All nodes that are cordoned: slots that still run there leave them, and none comes back."""
    return _closed(Same(view.nodes))


@lru_cache(4)  # all deployments of a look see the same thousands
def _closed(nodes: Same[Mapping[str, NodeView]]) -> frozenset[str]:
    return frozenset(name for name, node in nodes.value.items() if node.cordoned)


def _is_cordoned(view: View, name: str) -> bool:
    node = view.nodes.get(name)
    return node is not None and node.cordoned


def is_overdue(view: View, name: str) -> bool:
    """Whether a node that exists is away for longer than the grace period."""
    grace = timedelta(seconds=view.deployment.spec.replanning.grace_period_seconds)
    away = view.nodes[name].away_since
    return away is not None and view.now - away >= grace


def mass_loss(view: View, away: frozenset[str]) -> bool:
    """Whether so many nodes at once are more than is believed."""
    most = view.deployment.spec.replanning.max_simultaneous_node_loss
    return len(away) >= AT_LEAST and len(away) > most * len(view.nodes)


def _braked(view: View, unreached: frozenset[str]) -> str:
    away = unreached | {node.name for node in view.nodes.values() if node.away_since}
    if not mass_loss(view, away):
        return ""
    most = view.deployment.spec.replanning.max_simultaneous_node_loss
    return (
        f"{len(away)} of {len(view.nodes)} nodes are not Ready, or silent, at once, more than replanning.maxSimultaneousNodeLoss {most:g}: "
        "that counts as a false alarm, and nothing is moved. If they are lost, delete the Node objects or raise the share"
    )
