"""The operator's Prometheus metrics. Written by the controller, served on the metrics port."""

from collections import Counter as Count
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from strata_operator.api import LLMDeploymentStatus
from strata_operator.api.status import Replan
from strata_operator.render.records import moment

DEPLOYMENTS = Gauge("strata_operator_deployments", "LLMDeployments by phase", ["phase"])
EPOCHS = Counter("strata_operator_epochs", "Epochs made, by reason", ["reason"])
LOOKS = Histogram("strata_operator_look_seconds", "Seconds of one look at the cluster and its actions")
ERRORS = Counter("strata_operator_errors", "Looks that failed for no reason the operator knows")
UNREAD = Gauge(
    "strata_operator_unread_namespaces", "Watched namespaces that are left out: the operator may not read them"
)
REPLANS = Histogram(
    "strata_operator_replan_seconds",
    "Seconds since a new epoch was first wanted, by its reason, until it was planned, prepared, committed, and until a request that waited got a token",
    ["reason", "reached"],
    buckets=(0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
PAUSES = Histogram(
    "strata_operator_pause_seconds",
    "The longest that a client waited from one token to the next, of each new epoch for which answers were interrupted",
    ["reason"],
    buckets=(0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0),
)
LOST = Counter(
    "strata_operator_lost_requests", "Requests that ended in an error while a new epoch was made", ["reason"]
)
LEADING = Gauge("strata_operator_leading", "1 while this operator holds the lease")


def count_phases(deployments: Iterable[dict[str, Any]]) -> None:
    DEPLOYMENTS.clear()
    for phase, count in Count((each.get("status") or {}).get("phase", "New") for each in deployments).items():
        DEPLOYMENTS.labels(phase).set(count)


def count_replans(before: LLMDeploymentStatus, now: LLMDeploymentStatus) -> None:
    """What is said of new epochs for the first time. Called once it is stored: whoever leads next goes on from there."""
    known = {replan.epoch: replan for replan in before.replans}
    for replan in now.replans:
        earlier = known.get(replan.epoch)
        reached = _reached(earlier) if earlier else {}
        for name, seconds in _reached(replan).items():
            if name not in reached:
                REPLANS.labels(replan.reason, name).observe(seconds)
        if replan.requests_held and (earlier is None or earlier.requests_held is None):
            LOST.labels(replan.reason).inc(replan.requests_lost or 0)
            if replan.pause_ms:
                PAUSES.labels(replan.reason).observe(replan.pause_ms / 1e3)


def _reached(replan: Replan) -> dict[str, float]:
    """Seconds since it was noticed. A gateway's clock may be behind."""
    moments = {
        "planned": replan.planned_at,
        "prepared": replan.prepared_at,
        "committed": replan.committed_at,
        "nextToken": replan.next_token_at,
    }
    since = moment(replan.noticed_at or replan.at)
    return {name: max(0.0, (moment(at) - since).total_seconds()) for name, at in moments.items() if at}
