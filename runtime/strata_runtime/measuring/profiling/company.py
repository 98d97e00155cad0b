"""Company for a survey: processes that run layers of the same model meanwhile, as the other slots of one machine will.

Used by `survey`, which starts `python -m strata_runtime.measuring.profiling.company`. Cores of one machine share its memory: two processes
that each multiply single rows take half as long again as one alone, with eight rows 4 % longer. A profile of a core in company is
what a plan of several CPU devices on one machine needs.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_runtime.errors import InputError
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.stage import ProfiledStage, StageSpec
from strata_runtime.measuring.profiling.stored import make_models

_LAYERS = 12
_WORK = Work("decode", 4, 1, 64)  # a small decoding batch: what reads most for what it computes
_READY = "ready"
_END_SECONDS = 30.0


@contextmanager
def in_company(
    count: int, fields: dict[str, Any], format_name: FormatName, compute_type: ComputeType, kv_bits: int = 16
) -> Iterator[None]:
    """`count` processes of one thread that decode with layers of these shapes until the block, or this process, ends."""
    told = json.dumps({"fields": fields, "format": format_name, "computeType": compute_type, "kvBits": kv_bits})
    with ExitStack() as ending:
        others = [ending.enter_context(_one(told)) for _ in range(count)]
        for other in others:
            assert other.stdout is not None
            if other.stdout.readline().strip() != _READY:
                raise InputError("a process beside the measurement did not start; measure without company")
        yield


@contextmanager
def _one(told: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "strata_runtime.measuring.profiling.company"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:  # noqa: S603  our own
        assert other.stdin is not None
        other.stdin.write(f"{told}\n")
        other.stdin.flush()
        try:
            yield other
        finally:
            other.stdin.close()  # the sign to stop
            other.wait(_END_SECONDS)


def main() -> None:
    """Decode until stdin is closed."""
    wish = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    stop = threading.Event()
    threading.Thread(target=_until_closed, args=(stop,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        name: FormatName = wish["format"]
        models = make_models(wish["fields"], _LAYERS + 1, Path(folder), (name,))
        spec = StageSpec((name,) * _LAYERS, wish["computeType"], 1024, 128, kv_bits=wish["kvBits"])
        stage = ProfiledStage(models.folder(name), spec, torch.device("cpu"))
        stage.prepare(_WORK)
        stage.run(_WORK)
        sys.stdout.write(f"{_READY}\n")
        sys.stdout.flush()
        while not stop.is_set():
            stage.run(_WORK)


def _until_closed(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main()
