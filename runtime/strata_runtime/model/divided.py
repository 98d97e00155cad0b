"""A model's layers cut for one rank of several: smaller linears in the places of its own, and sums where ranks need each other's.

Called by the adapter while the model is on the meta device, so that whatever loads and checks it meets the smaller shapes. The code of the layers is
transformers' own: it takes its numbers of heads from the widths of what the projections give, or from fields that are set here. Experts go whole, some
to each rank; which of them a token goes to all ranks find alike.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from strata_planner.contract.sequence_state import SequenceState, states_of
from strata_planner.contract.shares import Shares, vocabulary
from strata_runtime.errors import InputError
from strata_runtime.formats.rounded.rounded_linear import WholeRowLinear
from strata_runtime.model.cached_heads import cached_heads
from strata_runtime.model.linears import KeptWeight
from strata_runtime.model.mixers import keeps_state
from strata_runtime.model.same_code import is_the_same
from strata_runtime.ranges import Range, Ranges
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.cut import (
    OF_ATTENTION,
    WHOLE,
    Cut,
    Heads,
    LinearCut,
    kind_of,
    length,
)
from strata_runtime.ranks.linears import NormOverAll, SummedLinear, SummedNorm, gathered, looked_up
from strata_runtime.ranks.state_cut import StateCut

Place = tuple[nn.Module, str]  # what holds a linear, and as what
_COUNTS_OF_QUERIES = ("num_heads", "num_attention_heads")
_COUNTS_OF_KEYS = ("num_key_value_heads", "num_kv_heads")
_ROUTERS = ("gate", "router")  # modules that choose experts, by weights of their own
_OF_EVERY_QUERY = ("sinks",)  # parameters of an attention with a value for each query head
# Projections whose queries, keys and values are told apart by the whole model's numbers.
_ONE_AFTER_THE_OTHER = (
    "qkv_proj",
    "c_attn",
)
_BEFORE_HEADS = ("q_a_layernorm", "kv_a_layernorm")  # norms within an attention of what all heads are made of
_NORMS = ((LlamaRMSNorm, True), (Olmo2RMSNorm, False))  # whether they round before they weigh
_EXPERTS_FIRST = 3  # dimensions of a parameter that holds all experts of a layer


@dataclass
class DividedLayer:
    """Where the linears of a layer are and what of each weight they are; `rows`: what of other parameters this rank has, where it is not all;
    `elsewhere`: parameters that only other ranks have. All by their paths in the whole model.
    """

    places: dict[str, Place]
    cuts: dict[str, LinearCut] = field(default_factory=dict)
    rows: dict[str, Ranges] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def keep_rows(self, module: nn.Module, name: str, path: str, rows: Ranges) -> None:
        """Only these of a parameter on the meta device."""
        whole: nn.Parameter = getattr(module, name)
        part = whole.new_empty(length(rows), *whole.shape[1:])
        setattr(module, name, nn.Parameter(part, requires_grad=False))
        self.rows[path] = rows


class Division:
    """How a model's modules are cut for one rank. `shares`: of each rank, none: equal ones. Raises InputError for models of which that is not known."""

    def __init__(self, config: Any, collectives: Collectives, shares: Shares = ()) -> None:
        self._collectives = collectives
        heads, width, _ = cached_heads(config)
        own = Heads(int(config.num_attention_heads), heads, width)
        self.cut = Cut(collectives.rank, collectives.ranks, own, shares)
        states = [each for each in states_of(config.to_dict()) if each is not None]
        self.state = StateCut(states[0], self.cut.of_each, collectives.rank) if states else None
        self.vocabulary = self._of_vocabulary(config.vocab_size)
        self._width = width

    def layer(self, layer: nn.Module, path: str, places: Mapping[str, Place]) -> DividedLayer:
        """Put the parts of this rank in the places of a layer's linears and of all else that ranks share. `path`: of the layer."""
        divided = DividedLayer(dict(places))
        mixers = {within: module for within, module in layer.named_modules() if keeps_state(module)}
        of_mixers = {each for mixer in mixers.values() for each in mixer.modules()}
        attentions = {parent for key, (parent, _) in places.items() if kind_of(key) in OF_ATTENTION} - of_mixers
        of_heads = {module for each in attentions for name, module in each.named_modules() if name not in _BEFORE_HEADS}
        apart = of_mixers | {getattr(parent, name) for parent, name in places.values()}
        for within, module in list(layer.named_modules()):
            if module not in apart:
                self._divide_module(module, f"{path}.{within}", divided, of_heads=module in of_heads)
        for within, mixer in mixers.items():
            self._divide_mixer(mixer, f"{path}.{within}", divided)
        for norm in [name for name, each in layer.named_modules() if each in of_heads]:
            self._sum_norm(layer, norm)
        for key, (parent, name) in places.items():
            self._divide_linear(key, parent, name, divided)
        for attention in attentions:
            self._count_heads(attention)
        return divided

    def _divide_module(self, module: nn.Module, where: str, divided: DividedLayer, *, of_heads: bool) -> None:
        """One that is no linear, alone. Raises InputError where it has more than norms and routers have, and nothing is known of it."""
        if isinstance(module, KeptWeight):
            self._divide_kept(module, where, divided)
        elif of_heads:
            self._divide_of_heads(module, where, divided)
        elif _has_experts(module):
            self._divide_experts(module, where, divided)
        elif where.rpartition(".")[2] not in _ROUTERS and any(each.ndim != 1 for each in _own(module).values()):
            raise _unknown(where)

    def _divide_linear(self, key: str, parent: nn.Module, name: str, divided: DividedLayer) -> None:
        whole: nn.Linear = getattr(parent, name)
        of_state = self.state if keeps_state(parent) else None
        cut = of_state.linear(name) if of_state else self.cut.linear(key, (whole.out_features, whole.in_features))
        if cut == WHOLE:
            return
        divided.cuts[key] = cut
        has_bias = "bias" in dict(whole.named_parameters())
        if has_bias and cut.columns and self.cut.rank:  # what is added up has a bias once
            has_bias = False
            divided.elsewhere.add(f"{key}.bias")
        rows, columns = cut.shape((whole.out_features, whole.in_features))
        part = nn.Linear(columns, rows, bias=has_bias, device="meta", dtype=whole.weight.dtype)
        if cut.columns is None:
            setattr(parent, name, part)
            return
        summed = SummedLinear(part, self._collectives)
        setattr(parent, name, summed)
        divided.places[key] = (summed, "inner")

    def state_of(self, whole: SequenceState | None) -> SequenceState | None:
        """What a sequence keeps on this rank of this state."""
        return None if whole is None else whole.part(self.cut.of_each, self.cut.rank)

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

    def join(self, layers: Iterable[nn.Module], head: nn.Module | None, table: nn.Module | None) -> None:
        """Once they are loaded: linears that need to know of the whole row ask the other ranks, the head answers for the whole vocabulary, the
        embedding takes ids of it.
        """
        for summed in (each for layer in layers for each in layer.modules() if isinstance(each, SummedLinear)):
            if isinstance(summed.inner, WholeRowLinear):
                summed.inner.largest = summed.largest
        if head is not None:
            head.forward = gathered(head.forward, self._collectives, self._widths)
        if table is not None:
            table.forward = looked_up(table.forward, self._collectives, self.vocabulary)

    def _of_vocabulary(self, size: int) -> tuple[int, int]:
        ranges = [vocabulary(size, self.cut.of_each, rank) for rank in range(self.cut.ranks)]
        self._widths = tuple(last - first for first, last in ranges)
        return ranges[self.cut.rank]

    def _divide_of_heads(self, module: nn.Module, where: str, divided: DividedLayer) -> None:
        """Parameters within an attention that are no linear's: of one head, or of each. Raises InputError for any other."""
        heads = self.cut.heads
        for name, parameter in _own(module).items():
            shape, path = tuple(parameter.shape), f"{where}.{name}"
            if name in _OF_EVERY_QUERY and shape == (heads.queries,):
                divided.keep_rows(module, name, path, (self.cut.queries,))
            elif shape == (heads.width,):
                continue
            elif shape in {(heads.queries, heads.width), (heads.keys, heads.width)}:
                divided.keep_rows(module, name, path, (self._heads_of(shape[0]),))
            elif shape in {(heads.queries * heads.width,), (heads.keys * heads.width,)} and hasattr(
                module, "variance_epsilon"
            ):
                first, last = self._heads_of(shape[0] // heads.width)
                divided.rows[path] = ((first * heads.width, last * heads.width),)
            else:
                raise _unknown(f"{path} {list(shape)}")
        if isinstance(
            module, nn.ModuleList
        ):  # of a norm for each head; those of other heads go, and the rest keep their names
            first, last = self._heads_of(len(module))
            for number in [each for each in range(len(module)) if not first <= each < last]:
                gone = module._modules.pop(str(number))  # noqa: SLF001, without giving the others new numbers
                assert gone is not None
                divided.elsewhere |= {f"{where}.{number}.{name}" for name, _ in gone.named_parameters()}

    def _divide_kept(self, module: KeptWeight, where: str, divided: DividedLayer) -> None:
        rows = self.cut.linear(where, (module.weight.shape[0], module.weight.shape[1])).rows
        if rows is not None:
            divided.keep_rows(module, "weight", f"{where}.weight", rows)

    def _divide_mixer(self, mixer: Any, where: str, divided: DividedLayer) -> None:
        """Parameters of a layer with state that are no linear's: of its heads or channels; the norm of each head is held whole."""
        assert self.state is not None
        linears = {f"{name}." for name, each in mixer.named_children() if isinstance(each, nn.Linear)}
        for name, parameter in list(mixer.named_parameters()):
            if name.startswith(tuple(linears)):
                continue
            rows = self.state.rows(name)
            within, _, attribute = name.rpartition(".")
            if rows:
                divided.keep_rows(mixer.get_submodule(within), attribute, f"{where}.{name}", rows)
            elif tuple(parameter.shape) != (self.state.whole.value_dim,):
                raise _unknown(f"{where}.{name} {list(parameter.shape)}")
        own = self.state.own
        counts = {"num_k_heads": own.key_heads, "num_v_heads": own.heads}
        counts |= {"key_dim": own.key_heads * own.key_dim, "value_dim": own.heads * own.value_dim}
        for name, count in counts.items():
            if hasattr(mixer, name):
                setattr(mixer, name, count)

    def _heads_of(self, count: int) -> Range:
        """Those of this rank among all query heads, or all key heads. Raises InputError where there are as many of neither."""
        known = {self.cut.heads.keys: self.cut.keys, self.cut.heads.queries: self.cut.queries}
        if count not in known:
            raise _unknown(f"what an attention has {count} of")
        return known[count]

    def _sum_norm(self, layer: nn.Module, within: str) -> None:
        """A norm over the values of all heads adds up squares of all ranks."""
        parent, _, name = within.rpartition(".")
        norm: Any = layer.get_submodule(within)
        weight = _own(norm).get("weight")
        if weight is None or weight.ndim != 1 or weight.shape[0] == self._width or isinstance(norm, nn.Linear):
            return
        heads = weight.shape[0] // self._width
        first, last = self._heads_of(heads)
        rounds_first = next((first for kind, first in _NORMS if is_the_same(type(norm).forward, kind.forward)), None)
        if rounds_first is None:
            raise _unknown(f"{within} ({type(norm).__name__})")
        counts = heads != self.cut.heads.keys or self.cut.counts_keys
        over_all = NormOverAll(weight.shape[0], norm.variance_epsilon, rounds_first, counts)
        own = nn.Parameter(weight.new_empty((last - first) * self._width), requires_grad=False)
        setattr(layer.get_submodule(parent), name, SummedNorm(own, over_all, self._collectives))

    def _divide_experts(self, module: Any, where: str, divided: DividedLayer) -> None:
        """Whole experts. Raises InputError where there are fewer of them than ranks."""
        count = next(each.shape[0] for each in _own(module).values() if each.ndim == _EXPERTS_FIRST)
        if count < self.cut.ranks:
            raise InputError(f"{self.cut.ranks} ranks cannot share {count} experts: each needs one; use fewer ranks")
        own = self.cut.of(count)
        for name, parameter in _own(module).items():
            if parameter.shape[0] != count:
                raise _unknown(f"{where}.{name} {list(parameter.shape)}")
            divided.keep_rows(module, name, f"{where}.{name}", (own,))
        module.own_experts, module.collectives = own, self._collectives

    def _count_heads(self, attention: Any) -> None:
        """In the fields that its forward reads."""
        queries, keys = (last - first for first, last in (self.cut.queries, self.cut.keys))
        counts = dict.fromkeys(_COUNTS_OF_QUERIES, queries) | dict.fromkeys(_COUNTS_OF_KEYS, keys)
        for name, count in counts.items():
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, count)
        attention.own_queries = (*self.cut.queries, self.cut.heads.queries)
        if any(hasattr(attention, name) for name in _ONE_AFTER_THE_OTHER):  # split by what the configuration says
            attention.config = copy.copy(attention.config)
            attention.config.num_attention_heads = queries
            attention.split_size = queries * self._width


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _has_experts(module: nn.Module) -> bool:
    return not isinstance(module, nn.Conv1d) and any(each.ndim == _EXPERTS_FIRST for each in _own(module).values())


def _unknown(what: str) -> InputError:
    return InputError(f"how {what} is cut over several devices is not known: give this model stages of one device each")
