"""The operator's Prometheus metrics. Written by the controller, served on the metrics port."""

from collections import Counter as Count
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

DEPLOYMENTS = Gauge("strata_operator_deployments", "LLMDeployments by phase", ["phase"])
EPOCHS = Counter("strata_operator_epochs", "Epochs made, by reason", ["reason"])
LOOKS = Histogram("strata_operator_look_seconds", "Seconds of one look at the cluster and its actions")
ERRORS = Counter("strata_operator_errors", "Looks that failed for no reason the operator knows")
UNREAD = Gauge(
    "strata_operator_unread_namespaces", "Watched namespaces that are left out: the operator may not read them"
)
LEADING = Gauge("strata_operator_leading", "1 while this operator holds the lease")


def count_phases(deployments: Iterable[dict[str, Any]]) -> None:
    DEPLOYMENTS.clear()
    for phase, count in Count((each.get("status") or {}).get("phase", "New") for each in deployments).items():
        DEPLOYMENTS.labels(phase).set(count)
