"""The forward of a decoder that goes as Llama's: for few tokens one call of the native library for all layers that are here.

Given to decoders by `fused_forwards`, over layers that could each be a call (`fused_layer`): what Python looks at between two layers their weights have driven
out of the caches. What is not taken goes the decoder's own way, to the same bits.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, NamedTuple

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from strata_runtime.kernels import native_layer
from strata_runtime.kernels.native_attention import Entries
from strata_runtime.kernels.native_calls import CHANGES
from strata_runtime.model.fused_layer import FusedLayer
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.outside import Outside
from strata_runtime.model.same_code import is_the_same

# Embedding, rotary positions, layers, norm; they differ in masks, which layers of the library have no use for.
_KNOWN = tuple(unwrap(each.forward) for each in (LlamaModel, MistralModel, Qwen2Model))


class Decoded(NamedTuple):
    """What a decoder hands to its model, without what transformers' own class looks at first."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class _Run(NamedTuple):
    """Layers for one call. `entries`: of each, by its number; the pool goes when it is let go."""

    found: tuple[int, int]  # at which number of `CHANGES`
    first: Any
    last: Any
    entries: tuple[tuple[int, weakref.ref[Entries]], ...]
    named: bytes

    def holds(self, batch: Batch) -> bool:
        return self.found == CHANGES.now and all(
            (entries := batch.layers[number].entries) is not None and entries is known()
            for number, known in self.entries
        )


@dataclass(eq=False)
class FusedDecoder:
    """`widest`: of its layers, whose step has memory for each of them."""

    module: Any
    widest: FusedLayer
    _runs: dict[int, _Run] = field(default_factory=dict, init=False)  # by tokens

    @classmethod
    def of(cls, module: Any) -> "FusedDecoder | None":
        """None: the module is none, or a layer cannot be such a call."""
        if not any(is_the_same(unwrap(type(module).forward), each) for each in _KNOWN):
            return None
        layers = [FusedLayer.whose(each) for each in module.layers if not isinstance(each, Outside)]
        fused = [each for each in layers if each is not None]
        if not fused or len(fused) < len(layers) or len({each.attention.head_dim for each in fused}) > 1:
            return None
        return cls(module, max(fused, key=lambda each: each.work_columns))

    def __deepcopy__(self, memo: dict[int, object]) -> "FusedDecoder":
        """Of a decoder with weights of its own, of which nothing is known yet."""
        return FusedDecoder(*copy.deepcopy((self.module, self.widest), memo))

    def forward(self, own: Callable[..., Any], **given: Any) -> Any:
        """As the decoder's own. Hooks see what goes into the first layer and what comes out of the last, as `inputs` the same, and change neither; with hooks
        elsewhere layers go one by one.
        """
        of_model = self.widest.attention.strata_step
        run = self._run(of_model)
        if run is None:
            return own(**given)
        hidden = given.get("inputs_embeds")
        if hidden is None:
            hidden = self.module.embed_tokens(given["input_ids"])
        positions = self.module.rotary_emb(hidden, position_ids=given["position_ids"])
        step = self.widest.step(of_model.batch, hidden, positions)
        if step is None:  # ranks have met for what is embedded: once, as on those that go their own way from the start
            return own(**given | {"input_ids": None, "inputs_embeds": hidden})
        for look in tuple(run.first._forward_pre_hooks.values()):  # noqa: SLF001
            look(run.first, (hidden,))
        out = native_layer.layers(hidden, step, run.named, of_model.begun, self.widest.meetings)
        for look in tuple(run.last._forward_hooks.values()):  # noqa: SLF001
            look(run.last, (hidden,), out)
        return Decoded(self.module.norm(out))

    def _run(self, of_model: Any) -> _Run | None:
        """Of the layers as they are now; None: one of them is to go its own way, or somebody looks at what one hands to the next. Kept until weights change."""
        batch: Batch | None = of_model.batch
        if batch is None or batch.tokens > native_layer.MOST_TOKENS:
            return None
        switch, known = self.widest.switch, self._runs.get(batch.tokens)
        if switch is not None and switch.strategy != "megatron":
            return None
        if known is not None and known.holds(batch):
            return known
        now = CHANGES.now
        layers = [each for each in self.module.layers if not isinstance(each, Outside)]
        fused = [FusedLayer.whose(each) for each in layers]
        if not layers or None in fused or any(_is_seen(layers, place) for place in range(len(layers))):
            return None
        entries, listed = [], []
        for each in fused:
            named = None if each is None else each.named(of_model)
            if each is None or named is None:
                return None
            entries.append((each.attention.layer_idx, weakref.ref(named[0])))
            listed.append(named[1])
        made = _Run(now, layers[0], layers[-1], tuple(entries), b"".join(listed))
        self._runs[batch.tokens] = made
        return made


def _is_seen(layers: Sequence[Any], place: int) -> bool:
    """Whether somebody looks at what comes to a layer from the one before or goes to the next one, or wants to know by what names."""
    layer = layers[place]
    before, behind = layer._forward_pre_hooks, layer._forward_hooks  # noqa: SLF001
    by_name = layer._forward_pre_hooks_with_kwargs or layer._forward_hooks_with_kwargs  # noqa: SLF001
    return bool((before and place) or (behind and place + 1 < len(layers)) or by_name)
