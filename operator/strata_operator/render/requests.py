"""What pods ask a node for: Kubernetes quantities, the effective request of a pod, and what is free on a node.

Called by inventory and render. Pure, over plain Kubernetes objects. Knows no deployment and no plan.
"""

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from strata_operator.errors import InvalidInputError

CPU = "cpu"
MEMORY = "memory"
GPU = "nvidia.com/gpu"

Amounts = dict[str, Decimal]  # resource -> amount: cores, bytes, devices

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i)?)")


def parse_quantity(quantity: str | float) -> Decimal:
    """`100m`, `1Gi`, `1e3`, 2 -> a number in base units. Raises InvalidInputError."""
    return _parsed(str(quantity))


@lru_cache(maxsize=4096)  # a cluster's pods ask for few different amounts
def _parsed(quantity: str) -> Decimal:
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        problem = f"{quantity!r} is not a Kubernetes quantity; write it as in 500m, 4Gi or 2"
        raise InvalidInputError(repr(quantity), [problem])
    number, exponent, suffix = match.groups()
    return Decimal(number + exponent) if exponent else Decimal(number) * _SUFFIXES[suffix or ""]


def amounts(resources: Mapping[str, Any] | None) -> Amounts:
    """Resource amounts as numbers."""
    return {name: parse_quantity(quantity) for name, quantity in (resources or {}).items()}


def pod_requests(pod: Mapping[str, Any]) -> Amounts:
    """What the scheduler counts for a pod.

    The larger of all containers together and of each init container in its turn; init containers that keep running
    (restartPolicy Always) count beside everything after them; the pod's overhead is added; requests of the pod as a
    whole, where it has them, replace the sum (KEP-753, KEP-2837).
    """
    spec = pod.get("spec", {})
    running = [_container_requests(container) for container in spec.get("containers", [])]
    sidecars: list[Amounts] = []
    peaks: list[Amounts] = []
    for container in spec.get("initContainers") or []:
        own = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars.append(own)
        peaks.append(added(own, *sidecars[: len(sidecars) - (container.get("restartPolicy") == "Always")]))
    effective = largest(added(*running, *sidecars), *peaks)
    whole = amounts((spec.get("resources") or {}).get("requests"))
    return added(effective | whole, amounts(spec.get("overhead")))


def added(*parts: Mapping[str, Decimal]) -> Amounts:
    names = {name for part in parts for name in part}
    return {name: sum((part.get(name, Decimal()) for part in parts), Decimal()) for name in names}


def largest(*parts: Mapping[str, Decimal]) -> Amounts:
    names = {name for part in parts for name in part}
    return {name: max(part.get(name, Decimal()) for part in parts) for name in names}


def remaining(available: Mapping[str, Decimal], taken: Iterable[Mapping[str, Decimal]]) -> Amounts:
    """What is left of each resource, never below nothing."""
    total = added(*taken)
    return {name: max(Decimal(), amount - total.get(name, Decimal())) for name, amount in available.items()}


def _container_requests(container: Mapping[str, Any]) -> Amounts:
    """Requests; a limit without a request is a request too."""
    resources = container.get("resources") or {}
    return amounts(resources.get("limits")) | amounts(resources.get("requests"))
