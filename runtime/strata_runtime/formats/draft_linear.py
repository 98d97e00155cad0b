"""A linear that can be multiplied by at fewer bits: its own weight, and beside it one to draft tokens with.

Put into a layer by `StageModel` where a draft weight is there; all of a stage share one `DraftSwitch`. Knows no steps; models know nothing of it.
"""

from torch import Tensor, nn

from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.kernels.native_calls import CHANGES


class DraftSwitch:
    """Whether the linears of a stage multiply by their draft weights now."""

    def __init__(self) -> None:
        self._is_on = False

    @property
    def is_on(self) -> bool:
        return self._is_on

    @is_on.setter
    def is_on(self, wanted: bool) -> None:
        if wanted != self._is_on:
            self._is_on = wanted
            CHANGES.happened()


class DraftLinear(nn.Module):
    """[..., K] -> [..., N], by `draft` while the switch is on, else by `target`."""

    def __init__(self, target: nn.Module, draft: AnyLinear, switch: DraftSwitch) -> None:
        super().__init__()
        self.target = target
        self.draft = draft
        self._switch = switch

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.draft(inputs) if self._switch.is_on else self.target(inputs)
        return out

    def native_product(self, tokens: int) -> bytes | None:
        """As of `QuantLinear`."""
        chosen = self.draft if self._switch.is_on else self.target
        named = getattr(chosen, "native_product", None)
        return None if named is None else named(tokens)


def target_of(linear: nn.Module) -> nn.Module:
    """The linear itself, without what it drafts with."""
    return linear.target if isinstance(linear, DraftLinear) else linear
