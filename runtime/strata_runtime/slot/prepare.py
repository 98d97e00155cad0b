"""Preparing an epoch: a thread that loads the roles of a slot. Started by the slot, which keeps serving meanwhile.

A role whose weights the slot already holds takes them over. Pages of layers that stay wait for the commit (`kept_pages`); memory is taken for the others
alone. Where serving ended because old and new weights do not fit
beside each other, a role that differs in bits alone takes them over too: its layers move one by one, and planes that stay are not read again.
Any other role is loaded as a difference: layers that a role here has too are shared with it, whoever serves, and only what is missing is read.
A prepare that supersedes another takes over what that has loaded and is wanted again, and lets it finish the role that it is at where that is wanted.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from weakref import WeakSet

import msgspec

from strata_planner.contract.control import Prepare, PrepareState
from strata_planner.contract.draft_weights import draft_wish, has_draft
from strata_planner.contract.moves import layers_in_common, taken_from
from strata_planner.contract.processors import bound
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import switches
from strata_runtime.errors import InputError, SupersededError, reason_of
from strata_runtime.loading.drafts import check_drafts
from strata_runtime.loading.layer_store import LayerStore
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.precision_switch import formats_after, read_change, role_after
from strata_runtime.loading.shadow import Shadow
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.binding import UNBOUND, Binding, device_of
from strata_runtime.slot.drafter_loading import check_draft_model, load_drafter
from strata_runtime.slot.epoch import LoadedRole, PreparedEpoch
from strata_runtime.slot.gathering import Fetch, fetches_for
from strata_runtime.slot.other_ranks import OtherRanks, check_ranks
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.slot.switching import moves_within, reading_beside

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.25  # for a prepare before, between two looks at how far it is


def same_weights(one: Role, other: Role) -> bool:
    """Whether a slot that holds `one` holds all that `other` needs."""
    return _holding(one) == _holding(other)


def differ_in_pool(one: Role, other: Role) -> bool:
    """Whether a slot that holds `one` holds the weights of `other`, beside whatever pool for keys and values."""
    return _weights(one) == _weights(other)


def _holding(role: Role) -> tuple[object, ...]:
    return (_weights(role), _pool(role))


def _weights(role: Role) -> tuple[object, ...]:
    drafting = tuple(has_draft(name, role.speculation) for name in role.format)
    shown = switches(role.strategies)  # to the other ranks
    return (role.format, shown, drafting, any(drafting) and role.speculation.draft_bits, *_place(role))


def differ_in_bits(one: Role, other: Role) -> bool:
    """Whether a slot that holds `one` holds what `other` needs, at other bits."""
    return (_place(one), _pool(one)) == (_place(other), _pool(other)) and draft_wish(one.speculation) == draft_wish(
        other.speculation
    )


def _place(role: Role) -> tuple[object, ...]:
    drafts_with = (role.speculation.draft_uri, role.speculation.has_head, role.watched) if role.leader else None
    tables = (role.embedding, role.head, role.head_format)
    return (role.layers, tables, role.model_uri, role.compute_type, role.devices, role.shares, drafts_with)


def _pool(role: Role) -> tuple[object, ...]:
    return (role.kv_bits, role.kv_page_budget, role.page_tokens, role.state_slots, role.logged_pages)


@dataclass(frozen=True, slots=True)
class Held:
    """What a prepare may take over: the roles that run or ran last, and what the prepare `before` it has loaded until it ends.

    `idle`: nothing runs that `roles` belongs to, so that it may be changed in place; what no role can use of it is let go first. `giving`: roles whose pages the
    new ones take at the commit. `shadow`: what the slot keeps of files, which the new roles may take.
    """

    roles: tuple[LoadedRole, ...] = ()
    before: "Loading | None" = None
    idle: bool = True
    giving: tuple[Role, ...] = ()
    shadow: Shadow | None = None


class Loading:
    """One prepare under way. `state` may be read from any thread; `changed` is called when a layer or the whole is done.

    Whatever is raised while it loads ends as `refused`. It starts when the one before it has ended, so that never two hold memory.
    """

    def __init__(
        self,
        prepare: Prepare,
        held: Held,
        changed: Callable[[], None],
        *,
        verify: bool = True,
        binding: Binding = UNBOUND,
    ) -> None:
        self.prepare = prepare
        self.result: PreparedEpoch | None = None
        total = sum(role.layers[1] - role.layers[0] + 1 for role in prepare.roles)
        self.state = PrepareState(epoch=prepare.epoch, phase="loading", layers_total=total)
        self._idle = held.idle
        sources = taken_from(held.giving, prepare.roles)
        self._awaited = {
            place: frozenset(layers_in_common(held.giving[source], prepare.roles[place]))
            for place, source in sources.items()
        }
        self._wanted: Sequence[Role] | None = None  # by the epoch that supersedes this one
        self._held = self._useful(held.roles)
        # With the bits that they have now; `before` may not know those.
        self._known = WeakSet(each.model for each in held.roles)
        self._store = store_of(held.roles)
        self._store.keep(prepare.roles)
        self._before = held.before
        self._shadow = held.shadow
        self._changed = changed
        self._verify, self._binding = verify, binding
        self._done = 0
        self._counting = threading.Lock()  # files are fetched by several threads
        self._loaded: list[LoadedRole] = []
        self._fetches: list[Fetch] = []
        self._serving = [each.cache for each in held.roles]
        self._thread = threading.Thread(target=self._run, name=f"prepare {prepare.epoch}", daemon=True)
        self._thread.start()

    def supersede(self, prepare: Prepare) -> None:
        """End as soon as nothing is under way that `prepare` wants again."""
        before = self._before
        self._wanted = prepare.roles
        if before is not None:
            before.supersede(prepare)

    def give(self) -> list[LoadedRole]:
        """What is whole, once the thread has ended; nobody has it but the caller then."""
        self._thread.join()
        self.result = None
        self._end_fetches()
        given, self._loaded = self._loaded, []
        return given

    def leave(self) -> None:
        """Nobody wants it any more, and nobody waits for it."""
        self._wanted = ()
        if not self._thread.is_alive():
            self._end_fetches()

    def give_layers(self) -> LayerStore:
        """What is held of roles that are not whole, once the thread has ended; nobody has it but the caller then."""
        self._thread.join()
        given, self._store = self._store, LayerStore()
        return given

    def _run(self) -> None:
        try:
            self._take_over()
            for role in self.prepare.roles:
                self._step(role)
                self._loaded.append(bound(self._binding.of(role), partial(self._load, role)))
            self._fetch_ahead()
        except SupersededError as error:
            self._end_fetches()
            self._change("refused", str(error))
        except BaseException as error:  # whatever it is, and whoever raised it: the controller has to hear of it
            self._loaded.clear()
            self._held.clear()
            self._end_fetches()
            log.exception("prepare of epoch %d is refused", self.prepare.epoch)
            self._change("refused", reason_of(error))
        else:
            self.result = PreparedEpoch(self.prepare, tuple(self._loaded), tuple(self._fetches))
            self._change("prepared")
        finally:
            if self._wanted is not None:
                self._loaded += self._held
            else:
                self._store.clear()
            self._held.clear()

    def _fetch_ahead(self) -> None:
        """Pages that other slots have for these roles, as far as they are full, while the old ones serve."""
        for loaded in self._loaded:
            if not any(loaded.cache is each for each in self._serving):
                self._fetches += fetches_for(loaded.role, self.prepare, loaded.cache.pools)
        for fetch in self._fetches:
            fetch.ahead(self._still_wanted)

    def _still_wanted(self) -> None:
        if self._wanted is not None:
            raise SupersededError("superseded by a higher epoch")
        self._tell(1)

    def _end_fetches(self) -> None:
        for fetch in self._fetches:
            if not fetch.is_taken:
                fetch.close()
        self._fetches.clear()

    def _take_over(self) -> None:
        """Waits for the prepare before, and keeps of it what is wanted again."""
        before = self._before
        if before is None:
            return
        seen, alive = 0, True
        while alive:
            alive = before.is_alive(WAIT_SECONDS)
            now = before.state.progress
            self._tell(now - seen)
            seen = now
        self._before = None
        given = [each for each in before.give() if each.model not in self._known]
        self._held += self._useful(given)
        self._store.put(*before.give_layers().parts(), *store_of(given).parts())
        self._store.keep((*self.prepare.roles, *(self._wanted or ())))

    def is_alive(self, seconds: float) -> bool:
        """Whether it still loads after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _useful(self, held: Iterable[LoadedRole]) -> list[LoadedRole]:
        def fits(one: LoadedRole, role: Role) -> bool:
            if _takes_another_pool(one) and differ_in_pool(one.role, role):
                return True
            return differ_in_bits(one.role, role) if self._idle else same_weights(one.role, role)

        roles = (*self.prepare.roles, *(self._wanted or ()))
        return [each for each in held if each.usable and any(fits(each, role) for role in roles)]

    def _load(self, role: Role) -> LoadedRole:
        check_drafts(role)
        count = role.layers[1] - role.layers[0] + 1
        for held in self._held:
            if same_weights(held.role, role):
                self._held.remove(held)
                held.model.speculation = role.speculation
                _watch(role, held.model)
                self._progress(count)
                return replace(held, role=role)
        if (model := self._take_model(role)) is not None:
            _watch(role, model)
            self._progress(count)
            return LoadedRole(role, model, self._cache(role, model))
        moved = self._move(role) if self._idle else None
        if moved is not None:
            return moved
        before = self._done
        folder = resolve_model(role.model_uri, lambda: self._step(role))
        drafts = role.leader and bool(role.speculation.draft_uri)
        if drafts:
            check_draft_model(role, folder, lambda: self._step(role))
        others = None
        if role.tensor_parallel > 1:
            check_ranks(role)
            others = OtherRanks(role, folder, verify=self._verify, binding=self._binding)
        model = load_stage(
            role,
            folder,
            lambda done, _: self._stored(role, before + done),
            device_of(role),
            LoadOptions(
                keep=True,
                verify=self._verify,
                collectives=others.collectives if others else None,
                store=self._store,
                shadow=self._shadow,
            ),
        )
        if others is not None:
            others.wait_loaded(lambda: self._check(role), lambda: self._tell(1))
        drafter = None
        _watch(role, model)
        if drafts:
            drafter = load_drafter(role, model, lambda: self._step(role))
        return LoadedRole(role, model, self._cache(role, model), drafter, others)

    def _cache(self, role: Role, model: StageModel) -> PagedKvCache:
        place = len(self._loaded)  # of the role that is being loaded
        return cache_of(role, model, self._awaited.get(place, ()))

    def _take_model(self, role: Role) -> StageModel | None:
        """Of a held role with another pool, which goes before the new one is made unless it still serves."""
        for held in self._held:
            if _takes_another_pool(held) and differ_in_pool(held.role, role):
                self._held.remove(held)
                held.model.speculation = role.speculation
                return held.model
        return None

    def _move(self, role: Role) -> LoadedRole | None:
        """A held role at other bits becomes this one; None if there is none, or one whose layers cannot move."""
        for held in [each for each in self._held if differ_in_bits(each.role, role)]:
            self._held.remove(held)
            layers = range(role.layers[0], role.layers[1] + 1)
            try:
                wanted = dict(zip(layers, role.bits, strict=True))
                moves = moves_within(held.role, held.model, wanted)
                if held.others is not None:
                    held.others.check_bits(wanted)
            except InputError as error:
                log.info("held layers are loaded anew: %s", error)
                continue
            if formats_after(held.role, dict(moves)) != role.format:
                continue
            self._progress(len(layers) - len(moves))
            for layer, bits in moves:
                with reading_beside(held.others, layer, bits) as others_read:
                    change = read_change(held.model, layer, bits)
                    others_read()
                    if held.others is not None:
                        held.others.swap_bits()
                    change.apply()
                held = replace(held, role=role_after(held.role, change))  # noqa: PLW2901  it is that now
                change.release()
                self._moved(role, held)
            _watch(role, held.model)
            return replace(held, role=role)
        return None

    def _moved(self, role: Role, held: LoadedRole) -> None:
        try:
            self._step(role)
        except SupersededError:
            self._held.append(held)  # whole, at the bits that its layers have now
            raise
        self._progress(1)

    def _stored(self, role: Role, layers: int) -> None:
        self._step(role)
        if layers > self._done:
            self._progress(layers - self._done)

    def _step(self, role: Role) -> None:
        """Something was read, stored or fetched for this role. Raises SupersededError."""
        self._check(role)
        self._tell(1)

    def _check(self, role: Role) -> None:
        """Raises SupersededError where nobody wants it any more."""
        wanted = self._wanted
        if wanted is not None and not any(same_weights(role, each) for each in wanted):
            raise SupersededError("superseded by a higher epoch")

    def _progress(self, layers: int) -> None:
        self._done += layers
        self._change("loading")

    def _change(self, phase: Literal["loading", "prepared", "refused"], reason: str = "") -> None:
        with self._counting:
            self.state = msgspec.structs.replace(self.state, phase=phase, reason=reason, layers_loaded=self._done)
        self._changed()

    def _tell(self, steps: int) -> None:
        """Without waking anybody: whoever watches looks now and then."""
        with self._counting:
            self.state = msgspec.structs.replace(self.state, progress=self.state.progress + steps)


def store_of(held: Iterable[LoadedRole]) -> LayerStore:
    """All that other roles may take of these."""
    store = LayerStore()
    for each in held:
        if each.usable:
            store.put(*each.model.parts())
    return store


def _takes_another_pool(held: LoadedRole) -> bool:
    """What drafts has pages like the pool's, and other ranks have pools of their own."""
    return held.drafter is None and held.others is None


def _watch(role: Role, model: StageModel) -> None:
    """The leader's own layers its head watches, for as long as it is loaded."""
    if not role.leader:
        model.watch(role.watched)
