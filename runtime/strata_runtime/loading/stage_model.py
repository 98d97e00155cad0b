"""The layers of one stage as one function from token ids or hidden states to hidden states or logits.

Made by `load_stage`, called once per step by the stage executor. Knows nothing of sequences: the Batch does.
"""

from collections.abc import Sequence

import torch
from torch import nn

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import NO_SPECULATION
from strata_planner.contract.sequence_state import keeps_state
from strata_planner.contract.strategies import StrategyName
from strata_runtime.formats.draft_linear import DraftLinear, DraftSwitch, target_of
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.kernels.native_calls import CHANGES
from strata_runtime.loading.layer_store import HeldLayer, HeldOutside
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.model.cached_heads import cached_heads
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.strategies import Switch
from strata_runtime.model.watched_layers import WatchedLayers


class StageModel:
    """One stage of one model. Not for two threads at once.

    `states`: what sequences keep in its layers without keys and values, by the layers' numbers; `keeps_state`: whether any layer of the model does.

    `source`: where its linears' weights lie, at any precision; None where the stage was not loaded from a folder by `load_stage`.

    `held`: its layers, by number, and what it has outside of them, as another stage may take them; empty where ranks share the stage.
    """

    def __init__(
        self, stage: ModelSlice, *, num_layers: int, device: torch.device, source: LinearSource | None = None
    ) -> None:
        config = stage.module.config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_kv_heads, self.head_dim, self.latent = cached_heads(config)
        self.rank = 0  # of those that share the stage
        if stage.division is not None:
            first, last = stage.division.cut.keys
            self.num_kv_heads, self.rank = last - first, stage.division.cut.rank
        self.states = stage.states
        self.keeps_state = keeps_state(config.model_type)
        self.num_layers = num_layers  # of this stage
        self.whole_layers: int = config.num_hidden_layers  # of the model
        self.dtype = stage.dtype
        self.device = device
        self.layers = stage.own_layers()
        self.source = source
        self.held: dict[int, HeldLayer] = {}
        self.held_outside: HeldOutside | None = None
        self.speculation = NO_SPECULATION  # for which its linears have draft weights
        self.switch = Switch()  # of the strategy, where several ranks share the stage and can run more than one
        self._drafting = DraftSwitch()
        self._stage = stage
        self._watched = WatchedLayers(())
        self._states: list[torch.Tensor] = []  # [tokens, hidden] of each watched layer

    @property
    def layers_begun(self) -> int:
        """So often some layer has been come to, in whatever step: where it grows, a step gets on."""
        return self._stage.step.begun.value

    def parts(self) -> tuple[HeldLayer | HeldOutside, ...]:
        """All that another stage may take."""
        outside = () if self.held_outside is None else (self.held_outside,)
        return (*self.held.values(), *outside)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [tokens] -> [tokens, hidden], where the stage embeds."""
        embedded: torch.Tensor = self._stage.module.get_input_embeddings()(tokens)
        return embedded

    def watch(self, layers: Sequence[int]) -> None:
        """From the next step on `take_states` has what these layers (numbered as in the whole model) hand on, and no others."""
        self._watched.end()
        self._watched = WatchedLayers([self._stage.layer(number) for number in layers])

    def take_states(self) -> list[torch.Tensor]:
        """[tokens, hidden] of each watched layer, of the newest step, once."""
        states, self._states = self._states, []
        return states

    def linears(self, layer: int) -> dict[str, nn.Module]:
        """The linears of a layer (numbered as in the whole model) as they are stored now, by key: the path in the whole model.

        With the key `source` finds the planes, tables and dense weights of the same linear.
        """
        return {key: target_of(getattr(parent, name)) for key, (parent, name) in self._stage.places(layer).items()}

    @property
    def has_drafts(self) -> bool:
        """Whether any of its linears has a draft weight."""
        return any(isinstance(module, DraftLinear) for layer in self.layers for module in layer.modules())

    def draft(self, layer: int, key: str) -> AnyLinear | None:
        """What a linear drafts with beside its own weight."""
        parent, name = self._stage.places(layer)[key]
        held = getattr(parent, name)
        return held.draft if isinstance(held, DraftLinear) else None

    def set_draft(self, layer: int, key: str, draft: AnyLinear | None) -> None:
        """From the next step on; None: with its own weight."""
        parent, name = self._stage.places(layer)[key]
        target = target_of(getattr(parent, name))
        setattr(parent, name, target if draft is None else DraftLinear(target, draft, self._drafting))
        CHANGES.happened()

    def check_format(self, name: FormatName) -> None:
        """Raises UnsupportedModelError for a format that layers of this model cannot be stored in."""
        check_formats(self._stage.module.config.to_dict(), (name,))

    def replace(self, layer: int, key: str, module: nn.Module) -> None:
        """Put another module in a linear's place, between two steps: for changes that its format does not make in place."""
        draft = self.draft(layer, key)
        parent, name = self._stage.places(layer)[key]
        setattr(parent, name, module)
        self.set_draft(layer, key, draft)  # and whoever kept what follows from linears hears of it

    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        """All that the libraries make kernels for in a step of this batch on a processor: what, its rows, its keys."""
        return self._stage.kernel_sizes(batch)

    def forward(
        self, inputs: torch.Tensor, batch: Batch, *, draft: bool = False, strategy: StrategyName = "megatron"
    ) -> torch.Tensor:
        """inputs: token ids [tokens] int64 where the stage embeds, else hidden states [tokens, hidden].

        Returns hidden states [tokens, hidden]; where the stage has the head, logits [rows, vocab] float32 of
        `batch.sample_rows`. The keys and values of all tokens are stored either way. `draft`: with draft weights, where linears have some.
        `strategy`: of the layers that can run it, where several ranks share the stage; the same on all of them.
        """
        self._drafting.is_on, self.switch.strategy = draft, strategy
        with torch.inference_mode():
            try:
                outputs = self._stage.compute(inputs, batch)
                self._states = self._watched.take(batch.tokens)
            finally:
                self._watched.forget()
            return outputs

    @property
    def begins_anywhere(self) -> bool:
        """Whether `forward_some` can begin with any of its layers."""
        return self._stage.begins_anywhere

    def forward_some(self, inputs: torch.Tensor, batch: Batch, layers: range) -> torch.Tensor:
        """Some of its layers in a row, by their numbers in the whole model: what they store is kept, as of `forward`.

        inputs: token ids [tokens] where the stage embeds and these begin with its first, else what enters the first of them, [tokens, hidden]. Returns what
        the last of them hands on, [tokens, hidden].
        """
        self._drafting.is_on, self.switch.strategy = False, "megatron"
        with torch.inference_mode():
            try:
                return self._stage.compute_some(inputs, batch, layers)
            finally:
                self._watched.forget()
