"""What layers hand on, kept for the step: for a head that drafts from hidden states. Used by StageModel; a model knows nothing of it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class WatchedLayers:
    """The outputs of some layers of one module, until `end`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._outputs: list[Tensor | None] = [None] * len(layers)
        self._hooks = [layer.register_forward_hook(partial(self._keep, place)) for place, layer in enumerate(layers)]

    def take(self, tokens: int) -> list[Tensor]:
        """[tokens, hidden] each, of the step that has just run; nothing of it is kept."""
        taken = [each[0, :tokens] for each in self._outputs if each is not None]
        self.forget()
        return taken

    def forget(self) -> None:
        self._outputs = [None] * len(self._outputs)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, place: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """output: [1, rows, hidden], padded rows included; of some architectures the first of a tuple."""
        self._outputs[place] = output[0] if isinstance(output, tuple) else output
