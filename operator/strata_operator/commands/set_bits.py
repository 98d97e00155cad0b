"""`strata set-bits`: gives layers of a deployment that `strata up` runs other bits, while it serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from strata_operator.act.control_client import BitsKeptError, Endpoint, NoAnswerError, ask, set_bits
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.local.errors import RefusedError
from strata_operator.local.record import RunningDeployment, running_deployment
from strata_operator.local.view import FILE_WIDTH
from strata_planner.contract.control import GetStatus, SetBits, SlotStatus, SwitchState
from strata_planner.contract.formats import ANY_PRECISION
from strata_planner.contract.plan import Stage

BITS = (*ANY_PRECISION, 16)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SetBitsOptions:
    """The flags of `strata set-bits`. `replica` None: all."""

    name: str
    layers: str
    bits: int
    replica: int | None


@dataclass(frozen=True, slots=True)
class Wish:
    """What one slot is asked for one of its roles."""

    slot: str
    replica: int
    stage: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`kept`: why not all layers have their bits; empty where they have."""

    wish: Wish
    state: SwitchState
    kept: str = ""


def run(options: SetBitsOptions) -> None:
    """Raises InvalidInputError for a wish that cannot be, NotReadyError if a slot is away, RefusedError if one keeps its bits."""
    deployment = running_deployment(options.name)
    wishes = wishes_of(options, deployment)
    try:
        answers = asyncio.run(_ask_all(deployment, wishes, options.bits))
    except NoAnswerError as error:
        raise NotReadyError(str(error)) from error
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(shown(answers), highlight=False)
    kept = [f"slot {answer.wish.slot}: {answer.kept}" for answer in answers if answer.kept]
    if kept:
        raise RefusedError("\n".join(kept))


def wishes_of(options: SetBitsOptions, deployment: RunningDeployment) -> list[Wish]:
    """Whom to ask for what. Raises InvalidInputError."""
    if options.bits not in BITS:
        raise InvalidInputError("--bits", [f"{options.bits} is none of {', '.join(map(str, BITS))}"])
    layers = parse_layers(options.layers, deployment.plan.num_layers)
    replicas = [each for each in deployment.plan.replicas if options.replica in (None, each.replica)]
    if not replicas:
        raise InvalidInputError(
            "--replica", [f"{options.replica} is none of the {len(deployment.plan.replicas)} replicas"]
        )
    asked = [(replica.replica, stage, _of(stage, layers)) for replica in replicas for stage in replica.stages]
    return [Wish(stage.slot, replica, stage.stage, own) for replica, stage, own in asked if own]


def parse_layers(text: str, count: int) -> list[int]:
    """`3-7,9` -> 3, 4, 5, 6, 7, 9. Raises InvalidInputError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise InvalidInputError("--layers", [f"'{part}' is no layer or range of layers; write for instance 3-7,9"])
        if dash and int(last) < int(first):
            raise InvalidInputError("--layers", [f"'{part}': a range goes upwards; write {last}-{first}"])
        layers.update(range(int(first), int(last or first) + 1))
    foreign = sorted(layer for layer in layers if layer >= count)
    if foreign or not layers:
        raise InvalidInputError("--layers", [f"'{text}': the model has layers 0 to {count - 1}"])
    return sorted(layers)


def shown(answers: Sequence[Answer]) -> Table:
    """A row per layer that has moved, and one for the rest of a role."""
    table = Table(title_justify="left")
    for column in ("replica", "stage", "slot", "layer", "bits", "read ms", "swap ms", "MiB"):
        table.add_column(column, justify="left" if column == "slot" else "right")
    for answer in answers:
        wish = answer.wish
        where = (str(wish.replica), str(wish.stage), wish.slot)
        moved = {done.layer for done in answer.state.done}
        for done in answer.state.done:
            size = (done.added_bytes - done.returned_bytes) / _MIB
            times = (f"{1e3 * done.read_seconds:.1f}", f"{1e3 * done.swap_seconds:.2f}")
            table.add_row(*where, str(done.layer), f"{done.bits_before} -> {done.bits}", *times, f"{size:+.1f}")
        rest = [layer for layer in wish.layers if layer not in moved]
        if rest:
            state = "unchanged" if answer.kept else "had them"
            table.add_row(*where, ", ".join(map(str, rest)), state, "", "", "")
    return table


def _of(stage: Stage, layers: Sequence[int]) -> tuple[int, ...]:
    first, last = stage.layers
    return tuple(layer for layer in layers if first <= layer <= last)


async def _ask_all(deployment: RunningDeployment, wishes: Sequence[Wish], bits: int) -> list[Answer]:
    """All at once: slots work beside each other."""
    return await asyncio.gather(*(_ask(deployment.endpoint(wish.slot), wish, bits) for wish in wishes))


async def _ask(endpoint: Endpoint, wish: Wish, bits: int) -> Answer:
    status = await ask(endpoint, GetStatus())
    epoch = status.committed_epoch if isinstance(status, SlotStatus) else 0
    request = SetBits(epoch=epoch, replica=wish.replica, stage=wish.stage, bits=dict.fromkeys(wish.layers, bits))
    try:
        return Answer(wish, await set_bits(endpoint, request))
    except BitsKeptError as error:
        return Answer(wish, error.state, str(error))
