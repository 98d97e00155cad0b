"""The language model in a checkpoint that takes more than text: its fields of config.json, and what its tensors are called there.

Called by whoever reads config.json, so that all of them read the same model. Everything else of such a checkpoint (a vision tower, its
projector) is left where it lies.
"""

from collections.abc import Mapping
from typing import Any

# Models of which the text part runs -> the type of that part, where its own fields do not say.
TEXT_PARTS: dict[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# What the whole model says of its language model too.
_OF_THE_WHOLE = ("tie_word_embeddings",)
# Its tensors' names, as they are stored -> in the language model by itself.
PREFIXES = (
    (r"^(?:model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model; a config.json of a model for text alone as it is."""
    model_type, inner = config.get("model_type"), config.get("text_config")
    if not isinstance(model_type, str) or model_type not in TEXT_PARTS or not isinstance(inner, Mapping):
        return dict(config)
    whole = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    return {"model_type": TEXT_PARTS[model_type], **inner, **whole}
