"""Pages that a role gets of another slot. Fetched ahead by the prepare's thread, while the old epoch serves; the rest by a thread of its own, from the commit on.

Nothing is awaited for ever: who is not reached, falls silent, or sends what no pages are, gives nothing more. What has come whole once is used as far as it goes, what
has not is computed again. Used by whoever prepares an epoch, and by the role.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from strata_planner.contract.block_names import TOKEN_BYTES
from strata_planner.contract.control import PageSource, Prepare
from strata_planner.contract.decoding import decode_frame
from strata_planner.contract.frames import (
    LARGEST_PART_BYTES,
    KvPages,
    PagesGiven,
    Survey,
    WantPages,
    encode,
    pages_decoder,
)
from strata_planner.contract.moves import why_never
from strata_planner.contract.roles import Role
from strata_planner.contract.values import ContractError
from strata_runtime.errors import RuntimeFaultError, StepError, SupersededError, reason_of
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.slot.fetch_pace import Came, after_message, is_slower, seconds_each
from strata_runtime.stage.bounds import check_pages
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.handover import Arriving
from strata_runtime.stage.inheritance import Inheritance
from strata_runtime.wire.transport import Keys, Link, connect

log = logging.getLogger(__name__)

AHEAD_SECONDS = 10.0  # the longest that pages are fetched while the old epoch serves
REST_SECONDS = 5.0  # and behind the commit, while nothing is served
CONNECT_SECONDS = 2.0  # the giver's prepare may be behind
SILENT_SECONDS = 5.0  # of a giver that is asked: slots commit one after the other
CREDIT_AHEAD, CREDIT = 1, 8  # messages asked for at once: ahead steps are not to be held up
_SLICE_MILLISECONDS = 20


class GoneError(RuntimeFaultError):
    """Who has pages is not reached, or says nothing."""


class SlowError(GoneError):
    """Nothing is served, and what it still has would be computed sooner."""


class Fetch:
    """From one slot. `pools`: of the layers of the role that are not its own slot's already. `each`: seconds to compute one token in one of them, 0: not known."""

    def __init__(
        self, source: PageSource, epoch: int, pools: Mapping[int, LayerPool], page_tokens: int, each: float = 0.0
    ) -> None:
        self.source = source
        self.arriving = Arriving(pools, page_tokens)
        self.whole = False  # all that there was has come once
        self.is_taken = False  # by a role, which ends it
        self.over = False  # nothing comes any more
        self._messages = self._bytes = 0
        self._each = each
        self._hurries = source.waits  # else there is time: the old epoch serves
        self._came: Came | None = None
        self._epoch, self._layers, self._page_tokens = epoch, sorted(pools), page_tokens
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._link = Link(self._socket, source.slot, time.monotonic(), CONNECT_SECONDS)
        connect(self._socket, source.endpoint, Keys.of(source.key), LARGEST_PART_BYTES)

    def of(self, role: Role) -> bool:
        """Whether it is for this role."""
        return (self.source.replica, self.source.stage) == (role.replica, role.stage)

    def ahead(self, step: Callable[[], None]) -> None:
        """What is full already, round after round, until there is little new in one. `step` is called now and then: its SupersededError alone is raised."""
        until = time.monotonic() + AHEAD_SECONDS
        try:
            while time.monotonic() < until and self._round(step, until, rest=False) > len(self._layers):
                pass
            self._told("before the commit")
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def go(self) -> None:
        """Fetch the rest, in a thread."""
        if not self.over:
            self._thread = threading.Thread(target=self._rest, name=f"pages of {self.source.slot}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        elif not self.over:
            self._end()

    def _rest(self) -> None:
        self._hurries, self._came = True, None
        try:
            self._round(lambda: None, time.monotonic() + REST_SECONDS, rest=True)
            self._told("with those behind the commit")
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
        finally:
            if not self.over:
                self._end()

    def _round(self, step: Callable[[], None], until: float, *, rest: bool) -> int:
        """How many messages came. Raises GoneError, StepError, ContractError."""
        came, done = 0, False
        while not done and time.monotonic() < until:
            want = WantPages(
                self._epoch, self.source.replica, self._layers, CREDIT if rest else CREDIT_AHEAD, rest=rest
            )
            self._socket.send(encode(want))
            while not isinstance(message := self._receive(step), PagesGiven):
                came += 1
            done = message.done
        self.whole |= done
        return came

    def _receive(self, step: Callable[[], None]) -> PagesGiven | KvPages:
        """The next message; pages are written. Raises GoneError, StepError, ContractError."""
        silent = time.monotonic() + SILENT_SECONDS
        while not self._socket.poll(_SLICE_MILLISECONDS):
            step()
            now = time.monotonic()
            self._link.read(now)
            if self._link.reason or self._stopped.is_set() or now > silent:
                raise GoneError(self._link.reason or "silent")
            self._look(now)
        header, *bodies = (part.buffer for part in self._socket.recv_multipart(copy=False))
        message = decode_frame(pages_decoder, header, LARGEST_PART_BYTES)
        if message.epoch != self._epoch or isinstance(message, WantPages):
            raise StepError(
                f"{type(message).__name__} of epoch {message.epoch} came; pages of {self._epoch} were asked for"
            )
        if isinstance(message, KvPages):
            check_pages(message, [len(body) for body in bodies], self._page_tokens)
            self._messages += 1
            self._bytes += sum(map(len, bodies))
            self.arriving.take(message, bodies)
            now = time.monotonic()
            self._came = after_message(self._came, sum(len(each.tokens) for each in message.blocks) // TOKEN_BYTES, now)
            self._look(now)
        return message

    def _look(self, now: float) -> None:
        """Raises SlowError."""
        if self._hurries and is_slower(self._came, now, self._each):
            raise SlowError("the rest is computed sooner than fetched")

    def _give_up(self, error: Exception) -> None:
        """Whatever it is, no epoch ends by it: the stage computes what has not come."""
        source = self.source
        if not self._stopped.is_set():
            is_foreseen = isinstance(error, GoneError | StepError | ContractError)
            log.warning(
                "slot %s gives no more pages of replica %d stage %d, layers %d-%d: %s",
                *(source.slot, source.replica, source.stage, self._layers[0], self._layers[-1], reason_of(error)),
                exc_info=None if is_foreseen else error,
            )
        self._end()

    def _told(self, when: str) -> None:
        source = self.source
        log.info(
            "pages of replica %d stage %d from slot %s, %s: %d messages, %d bytes, %s",
            *(source.replica, source.stage, source.slot, when, self._messages, self._bytes),
            "whole" if self.whole else "not whole",
        )

    def _end(self) -> None:
        self._link.monitor.close(linger=0)
        self._context.destroy(linger=0)
        self.over = True


def fetches_for(role: Role, prepare: Prepare, pools: Mapping[int, LayerPool]) -> list[Fetch]:
    """Of all slots that have pages of this role. `pools`: of its layers, but for those whose pages are its own slot's."""
    found = []
    each = seconds_each(role, prepare.steps[prepare.roles.index(role)]) if prepare.steps else 0.0
    for source in prepare.sources if not why_never(role) else ():
        wanted = {layer: pool for layer, pool in pools.items() if layer in source.layers}
        if (source.replica, source.stage) == (role.replica, role.stage) and wanted:
            found.append(Fetch(source, prepare.epoch, wanted, role.page_tokens, each))
    return found


class Gathered:
    """All pages that one role gets of others, and the survey that waits for them. Lives in the worker's thread."""

    def __init__(self, executor: StageExecutor, kept: Inheritance, fetches: Sequence[Fetch]) -> None:
        """`kept`: of the own slot."""
        self._executor, self._kept, self._fetches = executor, kept, fetches
        self._survey: Survey | None = None

    @property
    def awaits(self) -> bool:
        return self._survey is not None

    def asked(self, survey: Survey) -> None:
        self._survey = survey

    def answer(self) -> Survey | None:
        """To the survey that waits, once all is there."""
        survey = self._survey
        if survey is None or not all(fetch.over for fetch in self._fetches):
            return None
        self._survey = None
        if self._fetches:
            held = self._kept
            for fetch in self._fetches:
                held = fetch.arriving.joined(held) if fetch.whole else held
            self._executor.inherit(held)
            self._fetches = ()
        return self._executor.survey(survey)
