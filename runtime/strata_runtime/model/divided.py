"""A model's layers cut for one rank of several: smaller linears in the places of its own, and sums where ranks need each other's.

Called by the adapter while the model is on the meta device, so that whatever loads and checks it meets the smaller shapes. The code of the layers is
transformers' own: it takes its numbers of heads from the widths of what the projections give, or from fields that are set here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from strata_runtime.errors import InputError
from strata_runtime.model.cached_heads import cached_heads
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.cut import BY_INPUTS, Cut, Heads, LinearCut, kind_of, share
from strata_runtime.ranks.linears import SummedLinear, gathered, looked_up

Places = Mapping[str, tuple[nn.Module, str]]  # key of a linear -> what holds it
_COUNTS_OF_QUERIES = ("num_heads", "num_attention_heads")
_COUNTS_OF_KEYS = ("num_key_value_heads", "num_kv_heads")
_VOCABULARY_TILE = 32  # outputs that a packed head multiplies at once


class Division:
    """How a model's modules are cut for one rank. Raises InputError for models of which that is not known."""

    def __init__(self, config: Any, collectives: Collectives) -> None:
        self._collectives = collectives
        heads, width, latent = cached_heads(config)
        if latent:
            raise InputError(
                f"the latent keys of '{config.model_type}' are not cut over several devices: use stages of one device"
            )
        self.cut = Cut(collectives.rank, collectives.ranks, Heads(int(config.num_attention_heads), heads, width))
        self.vocabulary = self._of_vocabulary(config.vocab_size)
        self._width = width

    def layer(self, layer: nn.Module, places: Places) -> tuple[dict[str, tuple[nn.Module, str]], dict[str, LinearCut]]:
        """Put the parts of this rank in the places of a layer's linears. Where they are then, and what of each weight they are."""
        self._check(layer, places)
        moved: dict[str, tuple[nn.Module, str]] = {}
        cuts: dict[str, LinearCut] = {}
        for key, (parent, name) in places.items():
            whole: nn.Linear = getattr(parent, name)
            cut = cuts[key] = self.cut.linear(key, (whole.out_features, whole.in_features))
            added_up = cut.columns is not None  # and so is a bias, once
            has_bias = "bias" in dict(whole.named_parameters())
            part = _part(whole, cut, bias=has_bias and (self.cut.rank == 0 or not added_up))
            if kind_of(key) in BY_INPUTS:
                summed = SummedLinear(part, self._collectives)
                setattr(parent, name, summed)
                moved[key] = (summed, "inner")
            else:
                setattr(parent, name, part)
                moved[key] = (parent, name)
            if kind_of(key) == "queries":
                self._count_heads(parent)
        return moved, cuts

    def shrink_table(self, module: nn.Module) -> None:
        """An embedding or a head on the meta device: only this rank's rows."""
        first, last = self.vocabulary
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        module.weight = nn.Parameter(weight.new_empty(last - first, *weight.shape[1:]), requires_grad=False)
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = last - first, None
        elif isinstance(module, nn.Linear):
            module.out_features = last - first
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.new_empty(last - first), requires_grad=False)

    def join(self, head: nn.Module | None, table: nn.Module | None) -> None:
        """Once they are loaded: the head answers for the whole vocabulary, the embedding takes ids of it."""
        if head is not None:
            head.forward = gathered(head.forward, self._collectives, self._widths)
        if table is not None:
            table.forward = looked_up(table.forward, self._collectives, self.vocabulary)

    def _of_vocabulary(self, size: int) -> tuple[int, int]:
        tile = _VOCABULARY_TILE if size >= _VOCABULARY_TILE * self.cut.ranks else 1
        parts = [share(-(-size // tile), self.cut.ranks, rank) for rank in range(self.cut.ranks)]
        ranges = [(first * tile, min(last * tile, size)) for first, last in parts]
        self._widths = tuple(last - first for first, last in ranges)
        return ranges[self.cut.rank]

    def _check(self, layer: nn.Module, places: Places) -> None:
        """Every parameter is one of a linear, or as long as all ranks need it: what works on hidden states, or on one head."""
        attention = {parent for key, (parent, _) in places.items() if kind_of(key) in {"queries", "keys", "attended"}}
        inside = {module for each in attention for module in each.modules()}
        linears = {getattr(parent, name) for parent, name in places.values()}
        for path, module in layer.named_modules():
            if module in linears:
                continue
            of_heads = module in inside
            for name, parameter in module.named_parameters(recurse=False):
                known = parameter.shape == (self._width,) if of_heads else parameter.ndim == 1
                if not known:
                    raise _unknown(f"{path}.{name} {list(parameter.shape)}")
            if of_heads and isinstance(module, nn.ModuleList):  # of a module for each head
                raise _unknown(path)

    def _count_heads(self, attention: nn.Module) -> None:
        counts = dict.fromkeys(_COUNTS_OF_QUERIES, self.cut.queries) | dict.fromkeys(_COUNTS_OF_KEYS, self.cut.keys)
        for name, (first, last) in counts.items():
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, last - first)


def _unknown(what: str) -> InputError:
    return InputError(f"how {what} is cut over several devices is not known: give this model stages of one device each")


def _part(whole: nn.Linear, cut: LinearCut, *, bias: bool) -> nn.Linear:
    rows, columns = cut.rows or (0, whole.out_features), cut.columns or (0, whole.in_features)
    return nn.Linear(columns[1] - columns[0], rows[1] - rows[0], bias=bias, device="meta", dtype=whole.weight.dtype)
