"""Which GPUs run kernels written in Triton, and the one they are launched on. Called before each launch by all that has such kernels."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 in the tensor cores, asynchronous copies


@cache
def is_usable(device: torch.device) -> bool:
    """Whether Triton is there and compiles for this GPU. `device`: of CUDA."""
    has_triton = torch.version.cuda is not None and find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


def current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
