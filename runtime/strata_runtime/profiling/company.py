"""Company for a survey: processes that run layers of the same model meanwhile, as the other slots of one machine will.

Used by `survey`. Cores of one machine share its memory: two processes that each multiply single rows take half as long again as
one alone, with eight rows 4 % longer. A profile of a core in company is what a plan of several CPU devices on one machine needs.
"""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_runtime.errors import InputError
from strata_runtime.profiling.grid import Work
from strata_runtime.profiling.model import make_shallow
from strata_runtime.profiling.stage import ProfiledStage, StageSpec

_LAYERS = 12
_WORK = Work("decode", 4, 1, 64)  # a small decoding batch: what reads most for what it computes
_START_SECONDS = 120.0
_END_SECONDS = 30.0


@contextmanager
def in_company(
    count: int, fields: dict[str, Any], format_name: FormatName, compute_type: ComputeType
) -> Iterator[None]:
    """`count` processes of one thread that decode with layers of these shapes until the block ends."""
    context = multiprocessing.get_context("spawn")
    stop, ready = context.Event(), [context.Event() for _ in range(count)]
    wishes = (fields, format_name, compute_type)
    others = [context.Process(target=_decode, args=(*wishes, each, stop), daemon=True) for each in ready]
    for other in others:
        other.start()
    try:
        for each in ready:
            if not each.wait(_START_SECONDS):
                raise InputError(
                    f"a process beside the measurement did not start within {_START_SECONDS:g} s; measure without"
                )
        yield
    finally:
        stop.set()
        for other in others:
            other.join(_END_SECONDS)


def _decode(
    fields: dict[str, Any], format_name: FormatName, compute_type: ComputeType, ready: Event, stop: Event
) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = make_shallow(fields, _LAYERS + 1, Path(folder) / "model")
        spec = StageSpec((format_name,) * _LAYERS, compute_type, 1024, 128)
        stage = ProfiledStage(model, spec, torch.device("cpu"))
        stage.prepare(_WORK)
        stage.run(_WORK)
        ready.set()
        while not stop.is_set():
            stage.run(_WORK)
