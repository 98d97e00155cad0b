"""A slot process that loads nothing. FAKE_SLOT_REFUSES="b: reason", or a file that says so, makes slot b refuse, FAKE_SLOT_CRASHES=b makes it end.

FAKE_SLOT_HANGS=b makes it load for ever, FAKE_SLOT_LATE=FILE as long as the file names it. FAKE_SLOT_GONE=FILE ends every slot whose name the file has, once there is one.
FAKE_SLOT_ACCUSES=FILE makes every slot lose the one that the file names, once there is one. FAKE_SLOT_STUCK=FILE: a step of the slot that the file names hangs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from strata_planner.contract.control import SlotStatus, slot_request_decoder
from tests.operator.fake_processes import parse, serve
from tests.operator.fakes import FakeSlot


def refuse(slot: FakeSlot) -> None:
    said = os.environ.get("FAKE_SLOT_REFUSES", "")
    if said.startswith("/"):
        said = Path(said).read_text() if Path(said).is_file() else ""
    name, _, reason = said.partition(": ")
    slot.refuses = reason if name == slot.name else ""


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    gone = Path(os.environ.get("FAKE_SLOT_GONE", "/nowhere"))
    is_gone = gone.is_file() and options.name in gone.read_text().split()
    if is_gone or os.environ.get("FAKE_SLOT_CRASHES") == options.name:
        sys.stderr.write("ran out of luck\n")
        return 3
    slot = FakeSlot(options.name)
    slot.incarnation = str(os.getpid())
    refuse(slot)

    stuck = Path(os.environ.get("FAKE_SLOT_STUCK", "/nowhere"))
    accused = Path(os.environ.get("FAKE_SLOT_ACCUSES", "/nowhere"))

    late = Path(os.environ.get("FAKE_SLOT_LATE", "/nowhere"))

    def settle() -> SlotStatus | None:
        refuse(slot)
        if slot.running and not slot.hung and stuck.is_file() and stuck.read_text() == slot.name:
            stuck.unlink()
            slot.hang()
            return slot.status()
        if not slot.lost and accused.is_file():
            slot.lose(accused.read_text())
            return slot.status()
        is_late = os.environ.get("FAKE_SLOT_HANGS") == slot.name or (late.is_file() and late.read_text() == slot.name)
        if slot.prepare.phase != "loading" or is_late:
            return None
        slot.finish_loading()
        return slot.status()

    serve(f"{options.host}:{options.control_port}", slot_request_decoder, slot.handle, settle)
    return 0
