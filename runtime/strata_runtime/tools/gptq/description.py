"""What a written GPTQ checkpoint says of itself: `quantization_config`, as transformers, GPTQModel and vLLM read it.

Made by `__main__`, written by `writer`. Layers of other bits than most, and those left alone, are entries of `dynamic`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from strata_planner.contract.formats import GPTQ
from strata_planner.contract.quantization import Quantization, Zeros, read_quantization
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.model.layer_paths import LISTED
from strata_runtime.tools.gptq.solver import GptqSettings

CheckpointFormat = Literal["gptq", "gptq_v2"]
DENSE_BITS = 16
_DISTRIBUTION = "strata-llm"


@dataclass(frozen=True)
class Description:
    """`settings` but for the bits, which are `layer_bits`: one per layer, 16 where the layer is left as it is."""

    settings: GptqSettings
    layer_bits: tuple[int, ...]
    checkpoint_format: CheckpointFormat = "gptq"

    def __post_init__(self) -> None:
        wrong = sorted(set(self.layer_bits) - {*GPTQ, DENSE_BITS})
        if wrong:
            raise PrecisionError(f"layers of {wrong[0]} bits: choose from {', '.join(map(str, GPTQ))} and 16")
        if set(self.layer_bits) <= {DENSE_BITS}:
            raise PrecisionError("every layer is left at 16 bits: nothing would be quantized")

    @property
    def base_bits(self) -> int:
        """What most quantized layers have."""
        return Counter(bits for bits in self.layer_bits if bits != DENSE_BITS).most_common(1)[0][0]

    @property
    def zeros(self) -> Zeros:
        return self.quantization.zeros

    @property
    def quantization(self) -> Quantization:
        """As it will be read."""
        found = read_quantization({"quantization_config": self.config()})
        assert isinstance(found, Quantization)
        return found

    def config(self) -> dict[str, Any]:
        """The value of `quantization_config`. `desc_act` says whether groups need an order, not how they were found: that is under `meta`."""
        settings = self.settings
        described = {
            "quant_method": "gptq",
            "bits": self.base_bits,
            "group_size": settings.group or -1,
            "desc_act": settings.ordered,
            "static_groups": False if settings.ordered else settings.static_groups,
            "sym": settings.symmetric,
            "damp_percent": settings.damp,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": self.checkpoint_format,
            "pack_dtype": "int32",
            "meta": {
                "quantizer": [f"strata:{version(_DISTRIBUTION)}"],
                "act_order": settings.act_order,
                "static_groups": settings.static_groups,
            },
        }
        dynamic = self._dynamic()
        return described | ({"dynamic": dynamic} if dynamic else {})

    def _dynamic(self) -> dict[str, dict[str, int]]:
        entries: dict[str, dict[str, int]] = {}
        for bits in sorted(set(self.layer_bits) - {self.base_bits}):
            pattern = _layers_pattern([layer for layer, each in enumerate(self.layer_bits) if each == bits])
            if bits == DENSE_BITS:
                entries[f"-:{pattern}"] = {}
            else:
                entries[f"+:{pattern}"] = {"bits": bits, "group_size": self.settings.group or -1}
        return entries


def _layers_pattern(layers: Sequence[int]) -> str:
    """Matches from the beginning of a module's path, whatever the decoder is called in it, and fused modules too."""
    return rf"(?:.*\.)?{LISTED}\.(?:{'|'.join(map(str, layers))})\..*"
