"""How many drafted tokens were right, kept in the user's cache from run to run: written by `strata up`, read before plans are told.

One file for a model and a wish. What cannot be read is as good as absent: it is measured again.
"""

import asyncio
import contextlib
import datetime as dt
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from strata_operator.observe.model_identity import model_identity
from strata_planner.contract.acceptance import RECORD_VERSION, AcceptanceRecord, DraftCounts
from strata_planner.contract.control import GatewayStatus
from strata_planner.contract.plan import Plan, Speculation
from strata_planner.contract.store import cache_folder, write_whole
from strata_planner.contract.values import ContractError, to_json

log = logging.getLogger(__name__)

KEEP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What one file is of. `model`: its identity."""

    model: str
    wish: Speculation

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(self.model.encode() + to_json(self.wish)).hexdigest()
        return cache_folder() / f"acceptance-{digest[:16]}.json"


def subject_of(model_uri: str, wish: Speculation) -> Subject | None:
    """None where nothing is guessed, or nobody can tell which model it is."""
    model = model_identity(model_uri) if wish.mode != "none" else None
    return Subject(model, wish) if model else None


def kept_acceptance(model_uri: str, wish: Speculation) -> AcceptanceRecord | None:
    """What earlier runs measured."""
    subject = subject_of(model_uri, wish)
    return read(subject) if subject else None


def read(subject: Subject) -> AcceptanceRecord | None:
    try:
        return AcceptanceRecord.decode(subject.file.read_bytes(), subject.model, subject.wish)
    except (OSError, ContractError):
        return None


def add(subject: Subject, counts: DraftCounts) -> None:
    """To what is kept, if there is enough of it to be believed."""
    if not counts.tells:
        return
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    before = read(subject) or AcceptanceRecord(RECORD_VERSION, subject.model, subject.wish, DraftCounts(), today)
    try:
        write_whole(subject.file, before.merged(counts, today).encode())
    except OSError as error:
        log.warning("%s: %s; what was measured of drafts is not kept", subject.file, error.strerror)


class Keeper:
    """Adds what a gateway has counted since it was heard last, once that is enough."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._pending = DraftCounts()
        self._heard = DraftCounts()
        self._incarnation = ""

    def take(self, status: GatewayStatus | None) -> None:
        if status is None or status.drafted is None:
            return
        if status.incarnation != self._incarnation:  # it counts from nothing
            self._incarnation, self._heard = status.incarnation, DraftCounts()
        self._pending = self._pending.plus(status.drafted.since(self._heard))
        self._heard = status.drafted
        if self._pending.tells:
            add(self._subject, self._pending)
            self._pending = DraftCounts()


@contextlib.asynccontextmanager
async def acceptance_kept(
    plan: Plan, gateway: Callable[[], GatewayStatus | None], every_seconds: float = KEEP_SECONDS
) -> AsyncIterator[None]:
    """While this lasts, now and then, and when it ends. `gateway`: its newest status."""
    subject = subject_of(plan.model_uri, plan.speculation)
    if subject is None:
        yield
        return
    keeper = Keeper(subject)

    async def now_and_then() -> None:
        while True:
            await asyncio.sleep(every_seconds)
            keeper.take(gateway())

    task = asyncio.create_task(now_and_then(), name="acceptance")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        keeper.take(gateway())
