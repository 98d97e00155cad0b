"""What enters linears while windows run through their layer. Used by every calibration; knows none."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def inputs_heard(linears: Mapping[str, nn.Linear], hear: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within it `hear(name, inputs)` is called before each linear runs, with the very tensor that it is given."""

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: hear(name, inputs[0])

    handles = [linear.register_forward_pre_hook(hook_of(name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
