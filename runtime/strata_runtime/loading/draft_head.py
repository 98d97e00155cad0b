"""Loading an EAGLE-3 head from a folder in the published layout: config.json and safetensors. Called by the slot's prepare.

The decoder layer is called `midlayer` or `layers.0`, everything may stand behind `model.`. A token of the head's own small vocabulary is
`d2t[i] + i` in the model's; `t2d` says the same as a mask. Without an embedding of its own the head reads the model's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata_planner.contract.draft_head import FUSED, DraftHead
from strata_runtime.errors import InputError, reason_of
from strata_runtime.loading.blocked import dense_linear
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.model.eagle_head import EagleHead, HeadLinears, HeadNorms, Rotary, rotary_of

EMBEDDING, DRAFT_TOKENS, MASK = "embed_tokens.weight", "d2t", "t2d"
_LAYER = "layer."
_LAYERS = ("midlayer.", "layers.0.")
_QKV = ("q_proj", "k_proj", "v_proj")
_CPU = torch.device("cpu")


class HeadFolder:
    """What lies there: `shape`, and where each tensor is, by its name without what differs between publishers."""

    def __init__(self, folder: Path) -> None:
        """Reads config.json and the files' headers. Raises InputError and UnsupportedModelError for what is no head, or no whole one."""
        self.folder = folder
        self.config = _read_config(folder)
        self.shape = DraftHead.from_config(self.config)
        self._checkpoint = Checkpoint(folder)
        self._checkpoint.check(self._checkpoint.keys)
        self._keys = {_plain(key): key for key in self._checkpoint.keys}
        self._check_tensors()

    def targets(self, vocabulary: int) -> Tensor:
        """The token of each that it drafts, int64 [draft vocabulary]. `vocabulary`: tokens of the model that verifies. Raises InputError."""
        count = self.shape.draft_vocab_size
        if DRAFT_TOKENS not in self._keys:
            if count != vocabulary:
                raise InputError(
                    f"it drafts {count} of {vocabulary} tokens and has no tensor {DRAFT_TOKENS} that says which: fetch it again"
                )
            return torch.arange(count)
        targets = self._read(DRAFT_TOKENS, None).long() + torch.arange(count)
        low, high, distinct = int(targets.min()), int(targets.max()), len(set(targets.tolist()))
        if low < 0 or high >= vocabulary or distinct < count:
            raise InputError(
                f"its {DRAFT_TOKENS} maps {count} tokens to {distinct} from {low} to {high}; the model has the tokens 0 to "
                f"{vocabulary - 1}, and each is drafted by one at most: take a head of this model"
            )
        if MASK in self._keys:
            mask = self._read(MASK, None).bool()
            if mask.numel() <= high or not torch.equal(mask.nonzero().flatten(), targets.sort().values):
                raise InputError(f"its {DRAFT_TOKENS} and {MASK} name different tokens: it is damaged; fetch it again")
        return targets

    def load(
        self, vocabulary: int, model_embeds: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
    ) -> EagleHead:
        """`vocabulary`: rows of the embedding of the model that verifies; `model_embeds`: that embedding. Raises InputError."""

        def read(name: str) -> Tensor:
            return self._read(name, dtype).to(device)

        def linear(*names: str) -> nn.Module:
            weight = torch.cat([self._read(f"{name}.weight", dtype) for name in names]).to(device)
            biases = [self._read(f"{name}.bias", dtype) for name in names if f"{name}.bias" in self._keys]
            return dense_linear(weight, torch.cat(biases).to(device) if biases else None)

        targets, order = self.targets(vocabulary).sort()
        table = self._read("lm_head.weight", dtype)[order]  # so that draws in its order are draws in the model's
        attention, mlp = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
        return EagleHead(
            shape=self.shape,
            norms=HeadNorms(
                embedding=read(f"{_LAYER}input_layernorm.weight"),
                hidden=read(f"{_LAYER}hidden_norm.weight"),
                mlp=read(f"{_LAYER}post_attention_layernorm.weight"),
                out=read("norm.weight"),
            ),
            linears=HeadLinears(
                fc=linear("fc"),
                qkv=linear(*(attention + name for name in _QKV)),
                out=linear(f"{attention}o_proj"),
                gate_up=linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
                down=linear(f"{mlp}down_proj"),
                logits=dense_linear(table.to(device), None),
            ),
            embed=self._embedding(model_embeds, dtype, device),
            rotary=self._rotary(device),
            targets=targets.to(device),
        )

    def _embedding(
        self, model_embeds: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        if EMBEDDING not in self._keys:
            return model_embeds
        table = self._read(EMBEDDING, dtype).to(device)
        return lambda tokens: functional.embedding(tokens.clamp(max=table.shape[0] - 1), table)

    def _rotary(self, device: torch.device) -> Rotary:
        try:
            return rotary_of(self.config | {"head_dim": self.shape.head_dim}, device)
        except Exception as error:  # transformers looks fields up as it builds, with exceptions of several kinds
            raise InputError(
                f"its config.json makes no rotary positions ({reason_of(error)}): correct it, or fetch it again"
            ) from error

    def _read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        key = self._keys[name]
        return self._checkpoint.read([key], dtype, _CPU)[key]

    def _check_tensors(self) -> None:
        needed, optional = _shapes(self.shape)
        if self.shape.hidden_size != self.shape.target_hidden_size:
            needed[EMBEDDING] = optional.pop(EMBEDDING)
        missing, strange = (
            sorted(needed.keys() - self._keys),
            sorted(self._keys.keys() - needed.keys() - optional.keys()),
        )
        if missing or strange:
            said = f"lacks {len(missing)} tensors" if missing else f"has {len(strange)} that no such head has"
            raise InputError(
                f"{self.folder} {said}, for instance {(missing or strange)[0]}: an EAGLE-3 head of one Llama layer has fc, midlayer (or layers.0), "
                "norm and lm_head; fetch it again, or take another"
            )
        for name, shape in (needed | optional).items():
            found = name in self._keys and self._shape_of(name)
            if found and found != shape:
                raise InputError(
                    f"its tensor {self._keys[name]} is {list(found)}, by its config.json it is {list(shape)}: fetch the head again"
                )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        key = self._keys[name]
        return next(
            header[key].shape for each in self._checkpoint.files if key in (header := self._checkpoint.header(each))
        )


def _shapes(head: DraftHead) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Of the tensors that it must have, and of those that it may have."""
    hidden, width, drafted = head.hidden_size, head.intermediate_size, head.draft_vocab_size
    queries, keys = head.heads * head.head_dim, head.kv_heads * head.head_dim
    layer = {
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    needed = {f"{_LAYER}{name}.weight": shape for name, shape in layer.items()}
    needed |= {"fc.weight": (hidden, FUSED * head.target_hidden_size)}
    needed |= {"norm.weight": (hidden,), "lm_head.weight": (drafted, hidden)}
    biased = {f"{_LAYER}{name}.bias": shape[:1] for name, shape in layer.items() if name.startswith("self_attn")}
    optional = {EMBEDDING: (head.vocab_size, hidden), DRAFT_TOKENS: (drafted,), MASK: (head.vocab_size,)}
    optional |= {"fc.bias": (hidden,)}
    return (needed | biased, optional) if head.attention_bias else (needed, optional)


def _plain(key: str) -> str:
    key = key.removeprefix("model.")
    layer = next((name for name in _LAYERS if key.startswith(name)), None)
    return key if layer is None else _LAYER + key.removeprefix(layer)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): give the folder of an EAGLE-3 head") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is no JSON object: fetch the head again")
    return config
