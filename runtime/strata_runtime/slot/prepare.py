"""Preparing an epoch: a thread that loads the roles of a slot. Started by the slot, which keeps serving meanwhile.

A role whose weights the slot already holds takes them over; only its KV starts empty. Where serving ended because old and new weights do not fit
beside each other, a role that differs in bits alone takes them over too: its layers move one by one, and planes that stay are not read again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from strata_planner.contract.control import Prepare, PrepareState
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.precision_switch import formats_after, read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.epoch import LoadedRole, PreparedEpoch
from strata_runtime.slot.switching import moves_within

log = logging.getLogger(__name__)


def same_weights(one: Role, other: Role) -> bool:
    """Whether a slot that holds `one` holds all that `other` needs."""
    return _holding(one) == _holding(other)


def _holding(role: Role) -> tuple[object, ...]:
    return (role.format, *_place(role))


def differ_in_bits(one: Role, other: Role) -> bool:
    """Whether a slot that holds `one` holds what `other` needs, at other bits."""
    return _place(one) == _place(other)


def _place(role: Role) -> tuple[object, ...]:
    pages = (role.kv_bits, role.kv_page_budget, role.page_tokens)
    return (role.layers, role.embedding, role.head, role.model_uri, role.compute_type, role.devices, pages)


class Loading:
    """One prepare under way. `state` may be read from any thread; `changed` is called at every change of it.

    `idle`: nothing runs that `held` belongs to, so that it may be changed in place; what no role can use of it is let go first.
    """

    def __init__(
        self, prepare: Prepare, held: Sequence[LoadedRole], changed: Callable[[], None], *, idle: bool = False
    ) -> None:
        self.prepare = prepare
        self.result: PreparedEpoch | None = None
        total = sum(role.layers[1] - role.layers[0] + 1 for role in prepare.roles)
        self.state = PrepareState(epoch=prepare.epoch, phase="loading", layers_total=total)
        self._idle = idle
        self._held = [
            each for each in held if not idle or any(differ_in_bits(each.role, role) for role in prepare.roles)
        ]
        self._changed = changed
        self._done = 0
        self.superseded = False
        self._thread = threading.Thread(target=self._run, name=f"prepare {prepare.epoch}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            loaded = tuple(self._load(role) for role in self.prepare.roles)
        except (RuntimeFaultError, ValueError, OSError, MemoryError, RuntimeError) as error:
            log.exception("prepare of epoch %d is refused", self.prepare.epoch)
            self._change("refused", str(error) or type(error).__name__)
        else:
            self.result = PreparedEpoch(self.prepare, loaded)
            self._change("prepared")
        finally:
            self._held.clear()

    def _load(self, role: Role) -> LoadedRole:
        count = role.layers[1] - role.layers[0] + 1
        for held in self._held:
            if same_weights(held.role, role):
                self._held.remove(held)
                self._progress(count)
                return LoadedRole(role, held.model, held.cache)
        moved = self._move(role) if self._idle else None
        if moved is not None:
            return moved
        before = self._done
        device = _device(role)
        model = load_stage(
            role,
            resolve_model(role.model_uri),
            lambda done, _: self._progress(before + done - self._done),
            device,
            keep=True,
        )
        return LoadedRole(role, model, cache_of(role, model))

    def _move(self, role: Role) -> LoadedRole | None:
        """A held role at other bits becomes this one; None if there is none, or one whose layers cannot move."""
        for held in [each for each in self._held if differ_in_bits(each.role, role)]:
            self._held.remove(held)
            layers = range(role.layers[0], role.layers[1] + 1)
            try:
                moves = moves_within(held.role, held.model, dict(zip(layers, role.bits, strict=True)))
            except InputError as error:
                log.info("held layers are loaded anew: %s", error)
                continue
            if formats_after(held.role, dict(moves)) != role.format:
                continue
            self._progress(len(layers) - len(moves))
            for layer, bits in moves:
                change = read_change(held.model, layer, bits)
                change.apply()
                change.release()
                self._progress(1)
            return LoadedRole(role, held.model, held.cache)
        return None

    def _progress(self, layers: int) -> None:
        if self.superseded:
            raise RuntimeFaultError("superseded by a higher epoch")
        self._done += layers
        self._change("loading")

    def _change(self, phase: Literal["loading", "prepared", "refused"], reason: str = "") -> None:
        total = self.state.layers_total
        self.state = PrepareState(
            epoch=self.prepare.epoch,
            phase=phase,
            reason=reason,
            layers_loaded=self._done,
            layers_total=total,
        )
        self._changed()


def _device(role: Role) -> torch.device:
    """Where the role's (one) device is; a slot sees only its own GPUs, in the order of their indices."""
    device = role.devices[0]
    return torch.device("cpu") if device.type.lower().startswith("cpu") else torch.device("cuda", device.index)


def cache_of(role: Role, model: StageModel) -> PagedKvCache:
    return PagedKvCache(
        num_layers=model.num_layers,
        first_layer=role.layers[0],
        pages=role.kv_page_budget,
        page_tokens=role.page_tokens,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=model.device,
        kv_bits=role.kv_bits,
    )
