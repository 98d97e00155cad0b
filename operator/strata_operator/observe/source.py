"""Where the stock has its objects from: which kinds of which namespaces are followed, and `Lists`, which lists them all at each look.

`Lists` is what a look rests on where nobody watches, and how an operator that has just become the leader sees what the last one wrote.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS_OF_STRATA,
    NODES,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    ForbiddenError,
    Kind,
    Kube,
)
from strata_operator.observe.stock import Stock
from strata_operator.render.names import APP, EPOCH_LABEL, MANAGER_LABEL

OURS = f"{MANAGER_LABEL}={APP}"
EVERYWHERE = ""


class Followed(NamedTuple):
    """Objects of a kind in a namespace (empty: all of them) with some labels."""

    kind: Kind
    namespace: str = EVERYWHERE
    labels: str = ""

    @property
    def is_needed(self) -> bool:
        """Without volume claims there are only fewer warnings: roles may be an older release's."""
        return self.kind is not CLAIMS


SHARED = (Followed(NODES), Followed(PODS))


def followed_in(namespace: str) -> tuple[Followed, ...]:
    """Of an epoch the Secret is made first, so it comes after the ConfigMaps: no epoch that is being recorded is listed without it."""
    return (
        Followed(DEPLOYMENTS_OF_STRATA, namespace),
        Followed(STATEFUL_SETS, namespace, OURS),
        Followed(CONFIG_MAPS, namespace, f"{OURS},{EPOCH_LABEL}"),
        Followed(SECRETS, namespace, OURS),
        Followed(CLAIMS, namespace),
    )


class Source(Protocol):
    """Keeps `stock` up to date."""

    stock: Stock

    async def refresh(self) -> None:
        """Before a look. Raises NotReadyError where the stock is not to be relied on, or where no namespace may be read."""
        ...

    async def led(self) -> None:
        """This operator has just become the leader: what the last one wrote must be there. Raises NotReadyError."""
        ...

    async def close(self) -> None: ...


class Lists:
    """Everything, listed at every look."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...]) -> None:
        self.stock = Stock()
        self._kube, self._namespaces = kube, namespaces or (EVERYWHERE,)

    async def refresh(self) -> None:
        forbidden, _ = await asyncio.gather(
            list_namespaces(self._kube, self._namespaces, self.stock),
            asyncio.gather(*(take(self._kube, each, self.stock) for each in SHARED)),
        )
        leave_out(self.stock, forbidden, self._namespaces)

    async def led(self) -> None:
        """The next look lists anew in any case."""

    async def close(self) -> None: ...


async def take(kube: Kube, followed: Followed, stock: Stock) -> int:
    """List, and put it in stock; the version that it was listed at. Raises NotReadyError."""
    with stock.listing(followed.kind, followed.namespace) as listing:
        async for page in kube.pages(followed.kind, followed.namespace, followed.labels):
            listing.take(page.things, page.version)
    return listing.version


async def list_namespaces(kube: Kube, namespaces: Sequence[str], stock: Stock) -> dict[str, ForbiddenError]:
    """Strata's own objects; those namespaces of them that may not be read. Raises NotReadyError."""
    found = await asyncio.gather(*(_list_namespace(kube, namespace, stock) for namespace in namespaces))
    return {name: error for name, error in zip(namespaces, found, strict=True) if error}


def leave_out(stock: Stock, forbidden: Mapping[str, ForbiddenError], watched: Sequence[str]) -> None:
    """A namespace that is gone, or may not be read any more, is left out whole: half of it would look like lost records. `forbidden`: all of
    those watched that are. Raises an error where no other is left.
    """
    for namespace in forbidden:
        for followed in followed_in(namespace):
            stock.forget(followed.kind, namespace)
    stock.unread = {name: str(error) for name, error in forbidden.items()}
    if forbidden.keys() >= set(watched):
        raise next(iter(forbidden.values()))


async def _list_namespace(kube: Kube, namespace: str, stock: Stock) -> ForbiddenError | None:
    deployments, stateful_sets, config_maps, secrets, claims = followed_in(namespace)

    async def records() -> None:
        await take(kube, config_maps, stock)
        await take(kube, secrets, stock)

    try:
        await asyncio.gather(take(kube, deployments, stock), take(kube, stateful_sets, stock), records())
    except ForbiddenError as error:
        return error
    with suppress(NotReadyError):
        await take(kube, claims, stock)
    return None
