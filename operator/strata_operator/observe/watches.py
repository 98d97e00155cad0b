"""A stock that watches keep current: each kind of each namespace is listed once, then followed from the version of that list.

A watch that ends is taken up where it ended; one whose version the server has forgotten (410) is listed anew, as everything is from time to
time. Called by the operator's shell, read by the controller. Not kopf's indexes: these keep every object whole, and one that is deleted while
a watch is down stays in them for ever, as kopf's list after a 410 says what there is and not what is gone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from strata_operator.decide.backoff import Backoff, seconds_after
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import SECRETS, ForbiddenError, Kube, RefusedError
from strata_operator.observe.source import (
    EVERYWHERE,
    OURS,
    SHARED,
    Followed,
    followed_in,
    leave_out,
    list_namespaces,
    take,
)
from strata_operator.observe.stock import Stock, version_of
from strata_operator.observe.streams import Streams

log = logging.getLogger(__name__)

SERVER_SECONDS = 300  # so long a watch is asked to last
RELIST_SECONDS = 3600.0  # as often everything is listed, whatever the watches have said
LONGEST_PAUSE_SECONDS = 30.0
FIRST_SECONDS = 60.0  # so long a look waits for the first lists
BEHIND_SECONDS = 60.0


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


_decode = msgspec.json.Decoder(_Event).decode


class Reflector:
    """Keeps one kind of one namespace in stock. `version` is 0 while it is to be listed; `error`: why it is behind, and since when."""

    def __init__(
        self, followed: Followed, kube: Kube, streams: Streams, stock: Stock, changed: Callable[[], None]
    ) -> None:
        self.followed = followed
        self.version = 0
        self.was_listed = False
        self.error: NotReadyError | None = None
        self.behind_since = time.monotonic()
        self._kube, self._streams, self._stock, self._changed = kube, streams, stock, changed
        self._pauses = Backoff()
        self._relist_at = 0.0

    @property
    def behind_seconds(self) -> float:
        return time.monotonic() - self.behind_since if self.error or not self.version else 0.0

    @property
    def is_settled(self) -> bool:
        """It has been listed, or may not be."""
        return self.was_listed or isinstance(self.error, ForbiddenError)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if not self.version or time.monotonic() >= self._relist_at:
                    await self._list()
                await self._watch()
            except NotReadyError as error:
                self._fall_behind(error)
                if isinstance(error, RefusedError):
                    self.version = 0  # it is forgotten or wrong, or nobody may watch: begin anew
            except Exception as error:
                log.exception("watching %s failed", self.followed.kind.plural)
                self._fall_behind(NotReadyError(f"watching {self.followed.kind.plural} failed: {error}"))
                self.version = 0
            await self._pause()

    def _fall_behind(self, error: NotReadyError) -> None:
        if self.error is None:
            self.behind_since = time.monotonic()
        self.error = error
        self._changed()

    async def _list(self) -> None:
        version = await take(self._kube, self.followed, self._stock)
        self.version, self._relist_at = version or 1, time.monotonic() + RELIST_SECONDS
        self.error, self.was_listed = None, True
        self._changed()

    async def _watch(self) -> None:
        """Until the server ends it. Raises NotReadyError; RefusedError where it must be listed anew."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(SERVER_SECONDS),
            "resourceVersion": str(self.version),
        } | ({"labelSelector": self.followed.labels} if self.followed.labels else {})
        async with aclosing(
            self._streams.lines(self.followed.kind.path(self.followed.namespace), query, self._connected)
        ) as lines:
            async for line in lines:
                if line.strip():
                    self._hear(line)

    def _connected(self) -> None:
        self.error = None

    def _hear(self, line: bytes) -> None:
        """Raises NotReadyError."""
        plural = self.followed.kind.plural
        try:
            event = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RefusedError(f"a watch of {plural} says what is no event: {error}") from error
        if event.type == "ERROR":
            raise RefusedError(f"a watch of {plural} from version {self.version}: {event.object.get('message')}")
        self._pauses = Backoff()
        before = self._stock.news
        if event.type != "BOOKMARK":
            self._stock.hear(self.followed.kind, event.object, gone=event.type == "DELETED")
        self.version = max(self.version, version_of(event.object))
        if self._stock.news != before:
            self._changed()

    async def _pause(self) -> None:
        """None after a watch that said something; longer each time after those that did not."""
        if self._pauses.failures or self.error is not None or not self.version:
            await asyncio.sleep(min(seconds_after(self._pauses.failures), LONGEST_PAUSE_SECONDS))
        self._pauses = self._pauses.failed(0.0)


class Watches:
    """A source whose stock is kept by one reflector for each kind and namespace. `changed` is called after every change but those of
    other people's pods, which the next look finds.
    """

    def __init__(self, kube: Kube, streams: Streams, namespaces: tuple[str, ...], changed: Callable[[], None]) -> None:
        self.stock = Stock()
        self._kube, self._streams, self._changed = kube, streams, changed
        self._namespaces = namespaces or (EVERYWHERE,)
        self._settled = asyncio.Event()
        self._broken_epochs: set[tuple[str, str]] = set()  # whose Secret is not there, as a list has shown
        followed = (*SHARED, *(each for namespace in self._namespaces for each in followed_in(namespace)))
        self._reflectors = [Reflector(each, kube, streams, self.stock, self._heard) for each in followed]
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in self._reflectors]

    async def refresh(self) -> None:
        """What can be relied on is not older than BEHIND_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._settled.wait()
        forbidden = self._forbidden()
        came_back = [name for name in self.stock.unread if name not in forbidden]
        if came_back:  # what was left out although it could be read has not been heard of since
            forbidden |= await list_namespaces(self._kube, came_back, self.stock)
        leave_out(self.stock, forbidden, self._namespaces)
        for reflector in self._reflectors:
            self._check(reflector, forbidden)
        await self._complete_epochs()

    async def led(self) -> None:
        """What the last leader wrote may still be on its way in a watch."""
        if self._settled.is_set():
            forbidden = self._forbidden()
            readable = [name for name in self._namespaces if name not in forbidden]
            forbidden |= await list_namespaces(self._kube, readable, self.stock)
            leave_out(self.stock, forbidden, self._namespaces)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._streams.close()

    def _heard(self) -> None:
        if not self._settled.is_set() and all(
            each.is_settled or not each.followed.is_needed for each in self._reflectors
        ):
            self._settled.set()
        self._changed()

    def _forbidden(self) -> dict[str, ForbiddenError]:
        """By namespace."""
        return {
            each.followed.namespace: each.error
            for each in self._reflectors
            if each.followed not in SHARED and each.followed.is_needed and isinstance(each.error, ForbiddenError)
        }

    def _check(self, reflector: Reflector, forbidden: Mapping[str, ForbiddenError]) -> None:
        followed = reflector.followed
        if not followed.is_needed or (followed not in SHARED and followed.namespace in forbidden):
            return
        if not reflector.was_listed or reflector.behind_seconds > BEHIND_SECONDS:
            what = f"{followed.kind.plural} have not been heard of for {reflector.behind_seconds:.0f} s"
            raise NotReadyError(f"{what}: {reflector.error or 'they are being listed'}")

    async def _complete_epochs(self) -> None:
        """An epoch whose ConfigMap was heard of before its Secret: without it, it would be taken for a broken one."""
        for namespace in {namespace for namespace, _ in self.stock.half_epochs() - self._broken_epochs}:
            await take(self._kube, Followed(SECRETS, namespace, OURS), self.stock)
        self._broken_epochs = self.stock.half_epochs()
