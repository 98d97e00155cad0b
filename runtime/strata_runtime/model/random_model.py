"""Models with random weights and real shapes, of any architecture that transformers has. For tests and benchmarks.

Weights are drawn so that hidden states keep their size through the layers and every tensor matters: norms are not all
ones and biases not all zeros, so that two swapped tensors change the logits.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata_runtime.model.adapter import quiet

_DECAY = ".A_log"  # how fast a state decays, as a logarithm: where an architecture starts it is drawn, and not by our generator
_USUAL_DECAY = -2.0  # a state reaches back some ten tokens
_ROUTING_BIAS = (".e_score_correction_bias", ".expert_bias")  # all zero where nobody trains it


def make_random_model(
    folder: Path,
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5_000_000_000,
    **config: Any,
) -> Path:
    """Write config.json and safetensors of a random model to `folder`; returns it.

    `config`: the fields of the architecture's configuration that differ from its defaults. The whole model is held in
    memory once. The same arguments give the same weights.
    """
    settings = AutoConfig.for_model(model_type, **config)
    model = whole_model_class(settings).from_config(settings, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith(_DECAY):
                parameter.fill_(_USUAL_DECAY)
            _draw(parameter, generator)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(_ROUTING_BIAS):
                _draw(buffer, generator)
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder


def whole_model_class(config: Any) -> Any:
    """transformers' class for a causal language model with all that belongs to it, be it a vision tower."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def _draw(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Vectors (norms, biases) move away from where the architecture starts them; matrices keep their input's size."""
    if parameter.ndim == 1:
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)
    else:
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
