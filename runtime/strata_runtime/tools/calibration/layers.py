"""A model one layer at a time: the embedding, each decoder layer with dense weights, and the head, as functions of windows.

Used by `calibrate`, and by benchmarks that look into layers. The pieces are slices as a stage has them, so any
architecture that loads can be calibrated; never more than one is held.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS
from strata_planner.contract.frames import Segment
from strata_runtime.formats import make_linear
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.adapter import ModelSlice, read_config
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.model.layer_paths import within_layer

_PAGE_TOKENS = 16


class _PassingPool(LayerPool):
    """Keeps nothing: the keys of a whole text are its own."""

    def store(self, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        return key, value

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Piece:
    """Layers first..last (none if last < first) of a model, with the embedding or head if asked for."""

    def __init__(self, slice_: ModelSlice, layers: tuple[int, int], device: torch.device) -> None:
        self._slice = slice_
        self._layers = layers
        self._model = StageModel(slice_, num_layers=max(0, layers[1] - layers[0] + 1), device=device)

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """The linears of a layer by their path in it, as formats below 16 bits may store them."""
        names = {module: name for name, module in self._slice.module.named_modules()}
        found = [child for _, _, child in self._slice.linears(self._layers[0])]
        return {within_layer(names[child]): child for child in found}

    def run(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Windows of token ids [tokens] (embedding) or hidden states [tokens, hidden] -> hidden states, or logits
        [tokens, vocab] float32 with the head. Each window is a text of its own.
        """
        cache = self._cache(max((len(window) for window in windows), default=0))
        outputs = []
        for window in windows:
            batch = cache.plan([_whole(window)])
            outputs.append(self._model.forward(window.to(self._model.device), batch))
            cache.free(0)
        return outputs

    def differentiable(self, window: torch.Tensor) -> torch.Tensor:
        """What `run` gives of one window of at least two, with its graph: for gradients by the input and by weights that require them."""
        batch = self._cache(len(window)).plan([_whole(window)])
        batch = replace(batch, layers={layer: _PassingPool(pool.shape, ()) for layer, pool in batch.layers.items()})
        return self._slice.compute(window.to(self._model.device), batch)

    @property
    def keyed_linears(self) -> dict[str, nn.Linear]:
        """`linears` by their path in the whole model: the keys of what `strata quantize` stores."""
        places = self._slice.places(self._layers[0])
        held = {key: getattr(parent, name) for key, (parent, name) in places.items()}
        return {key: child for key, child in held.items() if type(child) is nn.Linear}

    def quantized(self, bits: int) -> dict[str, torch.Tensor]:
        """Each linear's weight as the runtime's format of `bits` gives it back, in the compute type."""
        name = DEFAULT_FORMAT_OF_BITS[bits]
        dtype = self._model.dtype
        with torch.no_grad():
            return {
                path: make_linear(linear.weight.data, None, name, dtype).dequantized().to(dtype)  # type: ignore[operator]
                for path, linear in self.linears.items()
            }

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """These linears compute with other weights for a while."""
        linears = self.linears
        dense = {path: linears[path].weight.data for path in weights}
        for path, weight in weights.items():
            linears[path].weight.data = weight
        try:
            yield
        finally:
            for path, weight in dense.items():
                linears[path].weight.data = weight

    def _cache(self, tokens: int) -> PagedKvCache:
        return PagedKvCache(
            num_layers=self._model.num_layers,
            first_layer=self._layers[0],
            pages=-(-tokens // _PAGE_TOKENS),
            page_tokens=_PAGE_TOKENS,
            kv_heads=self._model.num_kv_heads,
            head_dim=self._model.head_dim,
            latent=self._model.latent,
            dtype=self._model.dtype,
            device=self._model.device,
            states=self._model.states,
            state_slots=1,
        )


def _whole(window: torch.Tensor) -> Segment:
    """A text of its own, in a pool that holds nothing else."""
    return Segment(0, 0, len(window), len(window), tuple(range(-(-len(window) // _PAGE_TOKENS))))


class LayeredModel:
    """The pieces of one checkpoint, each loaded when it is asked for. Raises what loading a stage raises."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._checkpoint = Checkpoint(folder)
        self.num_layers: int = read_config(folder).num_hidden_layers

    def embedding(self) -> Piece:
        return self._load((0, -1), embedding=True)

    def layer(self, index: int) -> Piece:
        return self._load((index, index))

    def head(self) -> Piece:
        return self._load((self.num_layers, self.num_layers - 1), head=True)

    def _load(self, layers: tuple[int, int], *, embedding: bool = False, head: bool = False) -> Piece:
        config = read_config(self._folder)
        slice_ = ModelSlice(config, layers, embedding=embedding, head=head, dtype=self._dtype)
        sources = slice_.sources(self._checkpoint.keys)
        self._checkpoint.transposed = slice_.transposed(self._checkpoint.keys)
        self._checkpoint.check(key for keys in sources.values() for key in keys)
        slice_.initialise_buffers(self._device)
        for keys in sources.values():
            slice_.load(self._checkpoint.read(keys, self._dtype, self._device), self._device)
        slice_.finish()
        return Piece(slice_, layers, self._device)
