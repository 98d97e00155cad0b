"""Requests for other bits of running layers (`SetBits`): taken one after another, in a thread beside the workers. Used by the slot.

A request is judged as a whole before anything changes, by every rank of the stage: layers, formats, the any-precision copy, the role's memory. Then
each layer is read while steps go on and swapped between two of them, the same two on all ranks. What fails leaves its layer as it was; layers already changed stay.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from strata_planner.contract.control import SWITCH_OVER, LayerSwitch, SetBits, SwitchPhase, SwitchState
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.loading.precision_switch import Growth, check_change, growth_of, read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.stage.executor import OtherRanks, StageExecutor

log = logging.getLogger(__name__)

KEPT_STATES = 8  # of requests that are over
Move = tuple[int, int]  # layer, bits


def moves_within(role: Role, model: StageModel, wanted: dict[int, int]) -> list[Move]:
    """The layers of `wanted` that do not have their bits yet, those that get fewer first. Reads no weights.

    Raises InputError for a layer that the role does not have, one that cannot move, or if the role would not fit its device at any moment.
    """
    first, last = role.layers
    foreign = sorted(layer for layer in wanted if not first <= layer <= last)
    if foreign:
        raise InputError(f"layer {foreign[0]} is not of this role, which has layers {first} to {last}")
    moves = [(layer, bits) for layer, bits in sorted(wanted.items()) if role.bits[layer - first] != bits]
    moves.sort(key=lambda move: move[1] > role.bits[move[0] - first])
    for layer, bits in moves:
        check_change(model, layer, bits)
    _check_memory(role, model, moves)
    return moves


def _check_memory(role: Role, model: StageModel, moves: list[Move]) -> None:
    taken, usable = role.room_of(model.rank)
    for layer, bits in moves:
        growth = growth_of(model, layer, bits)
        if growth.net_bytes > 0 and taken + growth.peak_bytes > usable:
            raise InputError(
                f"layer {layer} at {bits} bits does not fit: the role takes {taken:,} bytes then, reading the layer adds {growth.peak_bytes:,}, "
                f"its device has {usable:,}; give other layers fewer bits in the same request, or ask for fewer"
            )
        taken += growth.net_bytes


class Switches:
    """The requests of one slot. `changed` is called, from any thread, at every change of `states`."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._states: list[SwitchState] = []
        # Asked first in a new thread, torch tells it the slot's number of threads; else oneDNN would take every core from the steps.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="set bits", initializer=torch.get_num_threads)

    @property
    def states(self) -> tuple[SwitchState, ...]:
        with self._lock:
            return tuple(self._states)

    def ask(self, request: SetBits, executor: StageExecutor) -> None:
        """Idempotent: a request under way is not taken twice, one that is fulfilled changes nothing."""
        known = next((state for state in self.states if state.request == request), None)
        if known and (known.phase not in SWITCH_OVER or (known.phase == "switched" and _has(executor.role, request))):
            return
        self._put(SwitchState(request, "waiting"))
        self._pool.submit(self._run, request, executor)

    def refuse(self, request: SetBits, reason: str) -> None:
        self._put(SwitchState(request, "refused", reason=reason))

    def close(self) -> None:
        """Call when the boundaries of all executors are closed: waits for the layer that is being read."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, request: SetBits, executor: StageExecutor) -> None:
        state = SwitchState(request, "switching")
        self._put(state)
        over: SwitchPhase = "refused"
        where = ""
        try:
            moves = moves_within(executor.role, executor.model, request.bits)
            if executor.others is not None:
                executor.others.check_bits(request.bits)
            over = "failed"
            for layer, bits in moves:
                where = f"layer {layer} keeps its bits: "
                state = msgspec.structs.replace(state, done=(*state.done, switch_layer(executor, layer, bits)))
                self._put(state)
        except Exception as error:  # noqa: BLE001  whatever it is: steps go on, and the status tells who asked
            log.warning("%s is %s: %r", request, over, error)
            self._put(msgspec.structs.replace(state, phase=over, reason=where + (str(error) or type(error).__name__)))
        else:
            self._put(msgspec.structs.replace(state, phase="switched"))

    def _put(self, state: SwitchState) -> None:
        """In the place of the last state of the same request, else behind the others."""
        with self._lock:
            requests = [each.request for each in self._states]
            if state.request in requests and state.phase != "waiting":
                self._states[requests.index(state.request)] = state
            else:
                self._states = [*(each for each in self._states if each.request != state.request), state]
            over = [each for each in self._states if each.phase in SWITCH_OVER]
            for old in over[:-KEPT_STATES]:
                self._states.remove(old)
        self._changed()


def switch_layer(executor: StageExecutor, layer: int, bits: int) -> LayerSwitch:
    """One layer of a running role: read, swap between two steps, return the memory; on all its ranks. Raises as `read_change` and the boundary do."""
    before = executor.role.bits[layer - executor.role.layers[0]]
    with reading_beside(executor.others, layer, bits) as growth_of_others:
        change = read_change(executor.model, layer, bits)
        growth = change.growth + growth_of_others()
        step, seconds = executor.switch(change)
    read_seconds = change.read_seconds
    started = time.perf_counter()
    change.release()
    done = LayerSwitch(
        layer=layer,
        bits_before=before,
        bits=bits,
        before_step=step,
        read_seconds=read_seconds,
        swap_seconds=seconds,
        return_seconds=time.perf_counter() - started,
        added_bytes=growth.added_bytes,
        returned_bytes=growth.returned_bytes,
    )
    log.info(
        "layer %d: %d -> %d bits, read in %.1f ms, swapped in %.2f ms",
        layer,
        before,
        bits,
        read_seconds * 1e3,
        seconds * 1e3,
    )
    return done


def reading_beside(
    others: OtherRanks | None, layer: int, bits: int
) -> contextlib.AbstractContextManager[Callable[[], Growth]]:
    """While this rank reads what makes a layer one of `bits` bits, the others do; the bytes of theirs, once they have."""
    return contextlib.nullcontext(Growth) if others is None else others.reading(layer, bits)


def _has(role: Role, request: SetBits) -> bool:
    return all(
        role.bits[layer - role.layers[0]] == bits
        for layer, bits in request.bits.items()
        if role.layers[0] <= layer <= role.layers[1]
    )
