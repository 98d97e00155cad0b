"""The kopf shell: it only watches. Whatever makes kopf put finalizers or annotations on objects must not be there."""

import kopf

from strata_operator.act.handlers import OperatorOptions, _register
from strata_operator.observe.inventory import InventoryOptions

OPTIONS = OperatorOptions(
    namespaces=(), runtime_image="", health_port=0, metrics_port=0, lease_namespace="strata", lease_name="strata"
)


def test_only_event_handlers_are_registered() -> None:
    registry = kopf.OperatorRegistry()
    _register(registry, OPTIONS, InventoryOptions())
    kinds = {name: len(part.get_all_handlers()) for name, part in vars(registry).items()}
    assert kinds["_watching"] == 1  # LLMDeployments
    assert kinds["_activities"] == 3  # login, startup, cleanup
    others = {name: count for name, count in kinds.items() if name not in {"_watching", "_activities"}}
    assert set(others.values()) == {0}
