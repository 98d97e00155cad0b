"""The gateway with requests that go to replicas in turn, whatever their speeds and loads: what `benchmarks.replicas` compares routing with."""

import itertools
import sys
from collections.abc import Iterable, Sequence
from unittest import mock

from strata_runtime.gateway import __main__ as gateway
from strata_runtime.gateway.routing import dispatcher
from strata_runtime.gateway.routing.routing import ReplicaLoad

_turns = itertools.count()


def choose(loads: Iterable[ReplicaLoad]) -> int | None:
    """The next of those that answer."""
    numbers = sorted(load.replica for load in loads)
    return numbers[next(_turns) % len(numbers)] if numbers else None


def main(arguments: Sequence[str] | None = None) -> int:
    with mock.patch.object(dispatcher, "choose", choose):
        return gateway.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
