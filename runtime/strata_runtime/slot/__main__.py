"""A slot's process: `python -m strata_runtime.slot --name S --control-port P`, with its key in STRATA_CONTROL_KEY.

Started by the operator or the local supervisor. Reads the command line, readies the process (heap, files, kernels) and runs a Slot.
"""

import argparse
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS
from strata_planner.contract.phases import age_seconds
from strata_planner.contract.processors import Division
from strata_runtime.allocator import set_up_heap
from strata_runtime.collector import freeze_imports
from strata_runtime.errors import InputError
from strata_runtime.file_pages import drop_file_pages
from strata_runtime.loading.warmup import warm_up
from strata_runtime.logs import set_up_logs
from strata_runtime.slot.nursery import open_at_start
from strata_runtime.slot.slot import Slot, SlotOptions
from strata_runtime.stopwatch import Stopwatch
from strata_runtime.wire.transport import take_all_files

log = logging.getLogger(__name__)


def parse(arguments: Sequence[str] | None) -> SlotOptions:
    parser = argparse.ArgumentParser(prog="strata-slot", description="One slot of a Strata pipeline.")
    parser.add_argument("--name", required=True, help="the slot's name in the plan")
    parser.add_argument("--host", default="127.0.0.1", help="address that all its ports listen at")
    parser.add_argument("--control-port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads to compute with; 0: all")
    parser.add_argument(
        "--ranks", type=int, default=1, help="devices of this slot that may share a stage: ranks, started ahead"
    )
    parser.add_argument(
        "--devices",
        type=_division,
        metavar="FIRST/ALL",
        help="into how many devices the processors of this machine are divided, and the number of the node's first, from 0; by default the slot's own are all",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        default=os.environ.get("STRATA_STEP_TIMEOUT_SECONDS", STEP_TIMEOUT_SECONDS),
        metavar="SECONDS",
        help="how long a step may always be still before it counts as hung; 0: for ever (also STRATA_STEP_TIMEOUT_SECONDS; default: %(default)s)",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not compare planes of any-precision copies with their checks as they are read (also STRATA_NO_VERIFY=1)",
    )
    known = parser.parse_args(arguments)
    key = os.environ.get("STRATA_CONTROL_KEY", "")
    if not key:
        parser.error("STRATA_CONTROL_KEY is empty: set it to the secret that the controller uses")
    if not 0 <= known.step_timeout < math.inf:
        parser.error(f"--step-timeout {known.step_timeout}: seconds, 0 or more")
    where = (known.name, known.host, known.control_port, key)
    division = known.devices or Division(devices=known.ranks)
    return SlotOptions(
        *where,
        known.threads,
        verify=not _not_verifying(known),
        ranks=known.ranks,
        division=division,
        step_timeout=known.step_timeout,
    )


def _division(text: str) -> Division:
    first, _, devices = text.partition("/")
    if not (first.isdigit() and devices.isdigit() and int(first) < int(devices)):
        raise argparse.ArgumentTypeError(f"'{text}': the first device of this node and how many there are, as in 0/2")
    return Division(int(first), int(devices))


def _not_verifying(known: argparse.Namespace) -> bool:
    return bool(known.no_verify) or os.environ.get("STRATA_NO_VERIFY", "") not in ("", "0")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    set_up_logs()
    if options.ranks > 1:
        open_at_start()  # before anything that a fork must not copy: the heap's arenas, threads, kernels
    set_up_heap()
    take_all_files()
    if options.threads:
        torch.set_num_threads(options.threads)
    watch = Stopwatch()
    with watch.during("warm-up"):
        warm_up()
    watch.tell(log)
    freeze_imports()
    drop_file_pages()
    try:
        slot = Slot(replace(options, start_seconds=age_seconds()))
    except InputError as error:
        print(f"strata-slot: {error}", file=sys.stderr)  # noqa: T201  the log may go elsewhere
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: slot.stop())
    log.info("slot %s is process %d and waits for roles", options.name, os.getpid())
    slot.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
