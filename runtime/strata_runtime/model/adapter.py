"""All that Strata knows of transformers: cutting a model to one stage, naming its tensors, reaching its attention.

Used by `load_stage` alone. It leans on loading internals of the one minor version that pyproject.toml allows: the meta
device, the registered checkpoint conversions (renames, merged experts), the attention interface.
"""

import contextlib
import dataclasses
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata_planner.contract.architectures import check_architecture
from strata_planner.contract.rows import TOKENS_AS_FLOATS, padded_rows
from strata_planner.contract.sequence_state import SequenceState, states_of
from strata_planner.contract.text_part import PREFIXES, text_part
from strata_runtime.errors import InputError, reason_of
from strata_runtime.kernels.native_calls import CHANGES
from strata_runtime.model.attention import kernel_sizes
from strata_runtime.model.attention_interface import Step, attention, use_attention_of_pages
from strata_runtime.model.divided import Division
from strata_runtime.model.embedding_side import EMBEDDING_SIDE, without_embedding_side
from strata_runtime.model.expert_parts import ExpertPart, expert_part, fused_parameters
from strata_runtime.model.fused_forwards import fuse
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.layer_paths import LAYER_LISTS
from strata_runtime.model.lean_imports import SmallOnCpu, without_compiler
from strata_runtime.model.linears import use_plain_linears
from strata_runtime.model.llama4 import use_routed_experts
from strata_runtime.model.outside import Outside, OutsideInTuple
from strata_runtime.model.padding import padded, pads
from strata_runtime.ranges import Ranges
from strata_runtime.ranks.cut import LinearCut

_ANSWER_IN_TUPLES = frozenset({"bloom", "falcon"})
# While it builds a model, transformers changes torch's default type and functions of its own for the whole process; two
# loads at once (a prepare, and a measurement beside it) would leave them changed.
_BUILDING = threading.Lock()


def read_config(folder: Path) -> Any:
    """The model's configuration. Raises UnsupportedModelError if the engine cannot run it, InputError if unreadable."""
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): fetch the model again") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} is no JSON object: fetch the model again")
    check_architecture(fields)
    try:
        return _text_config(AutoConfig.from_pretrained(folder), fields)
    except Exception as error:  # transformers checks fields with exceptions of several trees
        raise InputError(f"{path} is not a configuration of '{fields['model_type']}': {error}") from error


def _text_config(config: Any, fields: dict[str, Any]) -> Any:
    """Of the language model alone. `fields`: config.json."""
    part = text_part(fields)
    if part == fields:
        return config
    inner = config.text_config
    inner.tie_word_embeddings = part.get("tie_word_embeddings", inner.tie_word_embeddings)
    return inner


class ModelSlice:
    """A causal language model on the meta device of which only one stage's modules are left.

    `layers`: global numbers, first and last inclusive. Load the tensors of None (what lies outside the layers) and of
    each layer, in any order; then `module` computes. `division`: which part of its layers this rank has, where several share them.
    """

    def __init__(
        self,
        config: Any,
        layers: tuple[int, int],
        *,
        embedding: bool,
        head: bool,
        dtype: torch.dtype,
        division: Division | None = None,
    ) -> None:
        config.dtype = dtype  # some activations are built in the type that the configuration names
        self._config = config
        self.dtype = dtype
        self._layers = layers
        self._embedding = embedding
        self._head = head
        self.module = _on_meta(config, dtype)
        self._kept_types: dict[str, torch.dtype] = self.module._get_dtype_plan(dtype)  # noqa: SLF001, see the module's docstring
        self._transposed = use_plain_linears(self.module)
        use_routed_experts(self.module)
        self._conversions = [
            *(WeightRenaming(stored, own) for stored, own in PREFIXES),
            *get_model_conversion_mapping(self.module),
        ]
        prefix = self.module.base_model_prefix
        self._prefix = prefix if hasattr(self.module, prefix) else "model"  # Llama 4's is of the model with images
        self._whole = self.module.state_dict()  # meta tensors: names of the whole model, before it is cut
        self._tied: dict[str, str] = dict(self.module.all_tied_weights_keys)  # parameter -> the one it equals
        self._cut()
        self.step = Step()
        for module in self.module.modules():
            if hasattr(module, "layer_idx"):
                module.strata_step = self.step
        self._wanted = set(self.module.state_dict())
        self._renamed: dict[str, tuple[list[str], str | None]] = {}
        self._places = self._find_linears()
        self._shapes = {key: _shape(*place) for listed in self._places.values() for key, place in listed.items()}
        self.cuts: dict[str, LinearCut] = {}  # of linears that ranks share
        self.division = division
        self._rows: dict[str, Ranges] = {}  # parameters of no linear of which this rank has some rows
        if division is not None:
            self._divide(division)
        self._experts = self._find_experts()

    def sources(self, checkpoint_keys: Iterable[str]) -> dict[int | None, list[str]]:
        """Checkpoint keys that this stage needs, by layer. Raises InputError if a parameter would have none."""
        needed: dict[int | None, list[str]] = defaultdict(list)
        found: set[str] = set()
        for key in checkpoint_keys:
            names = self._names(key)
            here = self._wanted.intersection(names)
            if here and self._is_elsewhere(key):
                found |= here
            elif here:
                needed[self._layer_of(names[0])].append(key)
                found |= here
        missing = sorted(self._wanted - found - self._filled_by_ties(found))
        if missing:
            raise InputError(
                f"the checkpoint has no tensor for {len(missing)} parameters of this stage, for instance {missing[0]}: "
                "it is incomplete or belongs to another architecture"
            )
        return needed

    def load(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Put checkpoint tensors (all those of one layer, or those outside the layers) where they belong."""
        renamed = {self._own_name(key): tensor for key, tensor in tensors.items()}
        settings = LoadStateDictConfig(
            device_map={"": device},
            dtype=self.dtype,
            dtype_plan=self._kept_types,
            weight_mapping=self._conversions,
        )
        with quiet(), torch.no_grad():
            info, _ = convert_and_load_state_dict_in_model(self.module, renamed, settings)
        problems = [str(each) for each in (*info.mismatched_keys, *info.error_msgs, *info.conversion_errors.values())]
        if problems:
            raise InputError(f"the checkpoint does not fit config.json: {'; '.join(problems[:3])}")

    def initialise_buffers(self, device: torch.device) -> None:
        """Compute what no checkpoint holds (rotary frequencies, embedding scales). Call before loading."""
        for parameter in self.module.parameters():  # a checkpoint holds them
            parameter._is_hf_initialized = True  # noqa: SLF001
        for module in self.module.modules():
            module._is_hf_initialized = next(module.buffers(recurse=False), None) is None  # noqa: SLF001
        with _BUILDING:
            self.module._move_missing_keys_from_meta_to_device(set(), {"": device}, None, None)  # noqa: SLF001
            self.module._initialize_missing_keys(is_quantized=False)  # noqa: SLF001

    def linears(self, layer: int) -> list[tuple[nn.Module, str, nn.Linear]]:
        """Every nn.Linear that a layer (still) has, with the module and attribute that hold it."""
        held = [(parent, name, getattr(parent, name)) for parent, name in self._places[layer].values()]
        return [(parent, name, child) for parent, name, child in held if type(child) is nn.Linear]

    def places(self, layer: int) -> dict[str, tuple[nn.Module, str]]:
        """Key of each linear of a layer, its path in the whole model (`model.layers.0.mlp.down_proj`), with the module and
        attribute that hold it, in whatever format.
        """
        return self._places[layer]

    def shape(self, layer: int, key: str) -> tuple[int, int]:
        """[N, K] of a linear that is not stored yet, as config.json says."""
        parent, attribute = self._places[layer][key]
        linear: nn.Linear = getattr(parent, attribute)
        return linear.out_features, linear.in_features

    def whole_shape(self, layer: int, key: str) -> tuple[int, int]:
        """The same of all ranks together."""
        assert key in self._places[layer], key
        return self._shapes[key]

    def shape_of(self, layer: int, key: str, cut: LinearCut) -> tuple[int, int]:
        """The same of a part of all that ranks have together."""
        return cut.shape(self.whole_shape(layer, key))

    def rows_of(self, checkpoint_keys: Iterable[str]) -> dict[str, Ranges]:
        """Of those of the keys that are no linear's and that this rank has a part of: which rows."""
        named = ((key, name) for key in checkpoint_keys for name in self._names(key) if name in self._rows)
        return {key: self._rows[name] for key, name in named if not self._is_of_one_expert(key)}

    def experts(self, layer: int) -> dict[str, tuple[nn.Module, str]]:
        """As `places`, of the parameters [experts, N, K] that hold all experts of a layer."""
        return self._experts[layer]

    def fused_shape(self, layer: int, key: str) -> tuple[int, int, int]:
        """[experts, N, K] of one of `experts` that is not stored yet."""
        parent, attribute = self._experts[layer][key]
        count, rows, columns = getattr(parent, attribute).shape
        return count, rows, columns

    def expert_part(self, checkpoint_key: str) -> ExpertPart | None:
        """Which part of a layer's fused experts a checkpoint tensor is, by the expert's number in this stage; None: of none."""
        part = self._part_of_experts(checkpoint_key)
        if part is None or part.expert is None:
            return part
        return dataclasses.replace(part, expert=part.expert - self.first_expert(part.key))

    def first_expert(self, key: str) -> int:
        """The number in the whole model of the first expert that this stage has of one of `experts`."""
        return self._rows[key][0][0] if key in self._rows else 0

    def _is_of_one_expert(self, checkpoint_key: str) -> bool:
        part = self._part_of_experts(checkpoint_key)
        return part is not None and part.expert is not None

    def _is_elsewhere(self, checkpoint_key: str) -> bool:
        """Whether a tensor is of an expert that another rank has."""
        part = self._part_of_experts(checkpoint_key) if self.division is not None else None
        if part is None or part.expert is None or part.key not in self._rows:
            return False
        first, last = self._rows[part.key][0]
        return not first <= part.expert < last

    def _part_of_experts(self, checkpoint_key: str) -> ExpertPart | None:
        names, pattern = self._renaming(checkpoint_key)
        if not any(names[0] in layer for layer in self._experts.values()):
            return None
        converters = (entry for entry in self._conversions if isinstance(entry, WeightConverter))
        return expert_part(checkpoint_key, names[0], pattern, converters)

    def plain_parameter(self, checkpoint_key: str) -> str | None:
        """The parameter of the whole model that a checkpoint tensor is, as it lies there; None: it is converted or merged first."""
        names, pattern = self._renaming(checkpoint_key)
        return names[0] if pattern is None else None

    def transposed(self, checkpoint_keys: Iterable[str]) -> frozenset[str]:
        """Those tensors that lie in the checkpoint as [in, out] where the model has them as [out, in]."""
        return frozenset(
            key
            for key in checkpoint_keys
            if (self.plain_parameter(key) or "").removesuffix(".weight") in self._transposed
        )

    def type_of(self, checkpoint_key: str) -> torch.dtype:
        """That a tensor outside the linears is read in: some values are never rounded."""
        return next((each for name, each in self._kept_types.items() if name in checkpoint_key), self.dtype)

    @property
    def states(self) -> dict[int, SequenceState]:
        """What sequences keep in those of this stage's layers that are no attention; on this rank, where several share them."""
        first, last = self._layers
        whole = states_of(self._config.to_dict())
        every = enumerate(whole if self.division is None else map(self.division.state_of, whole))
        return {layer: state for layer, state in every if state is not None and first <= layer <= last}

    def own_layers(self) -> list[nn.Module]:
        """This stage's decoder layers, in order."""
        first, last = self._layers
        return list(self._list[first : last + 1])

    def layer(self, number: int) -> nn.Module:
        """By its number in the whole model."""
        found: nn.Module = self._list[number]
        return found

    def outside(self) -> dict[str, nn.Module]:
        """What this stage computes with outside its layers, by path: the modules there that have no others in them."""
        named = self.module.named_modules(remove_duplicate=False)
        apart = ((path, each) for path, each in named if not path.startswith(f"{self._list_path}."))
        return {path: each for path, each in apart if not any(each.children()) and not isinstance(each, Outside)}

    def shares(self, path: str) -> bool:
        """Whether a module outside the layers has weights that another has too, in this stage."""
        return self._embedding and self._head and any(path in map(_module_of, pair) for pair in self._tied.items())

    def put_outside(self, path: str, module: nn.Module) -> None:
        """In the place of one of `outside`."""
        parent, _, attribute = path.rpartition(".")
        setattr(self.module.get_submodule(parent), attribute, module)

    def lacks(self, checkpoint_key: str) -> bool:
        """Whether the parameter that a tensor outside the layers fills has no values yet."""
        path, _, attribute = self._own_name(checkpoint_key).rpartition(".")
        try:
            value = getattr(self.module.get_submodule(path), attribute, None)
        except AttributeError:
            return True  # it is renamed on its way
        return isinstance(value, torch.Tensor) and value.is_meta

    def tie(self) -> None:
        """One table for embedding and head where both are here and the checkpoint did not bring two different ones."""
        head = self.module.get_output_embeddings()
        if not (self._embedding and self._head and isinstance(getattr(head, "weight", None), nn.Parameter)):
            return
        for name, source in self._tied.items():
            own, shared = self.module.get_parameter(name), self.module.get_parameter(source)
            if shared.is_meta:
                _set_parameter(self.module, source, own)
            elif own.is_meta or torch.equal(own, shared):
                _set_parameter(self.module, name, shared)

    def own_head(self, *, shared: bool) -> list[tuple[nn.Module, str, nn.Linear]]:
        """The head as `linears` gives them; one that shares its weight with this stage's embedding only if `shared`."""
        head, table = self.module.get_output_embeddings(), self.module.get_input_embeddings()
        if type(head) is not nn.Linear or (head.weight is getattr(table, "weight", None) and not shared):
            return []
        return [(self.module, name, child) for name, child in self.module.named_children() if child is head]

    def share_table(self, pair_of: Callable[[nn.Linear, nn.Embedding], tuple[nn.Module, nn.Module] | None]) -> None:
        """Where head and embedding of this stage have one weight: what `pair_of` makes of them, if anything, takes their places."""
        head, table = self.module.get_output_embeddings(), self.module.get_input_embeddings()
        if type(head) is not nn.Linear or not isinstance(table, nn.Embedding) or head.weight is not table.weight:
            return
        pair = pair_of(head, table)
        if pair is not None:
            self.module.set_output_embeddings(pair[0])
            self.module.set_input_embeddings(pair[1])

    def finish(self) -> None:
        """Switch to inference. Raises InputError if a parameter was never filled."""
        empty = [name for name, value in _parameters_and_buffers(self.module) if value.is_meta]
        if empty:
            raise InputError(f"{len(empty)} parameters were not filled, for instance {empty[0]}: report this model")
        self.module.requires_grad_(requires_grad=False)
        self.module.eval()
        if self.division is not None:
            head = self.module.get_output_embeddings() if self._head else None
            self.division.join(self.own_layers(), head, self.module.get_input_embeddings() if self._embedding else None)
        if all(parameter.device.type == "cpu" for parameter in self.module.parameters()):
            fuse(self.module, attention)

    def compute(self, inputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """inputs: token ids [tokens] where the slice embeds, else hidden states [tokens, hidden].

        Returns hidden states [tokens, hidden]; with the head, logits [rows, vocab] float32 of `batch.sample_rows`.
        """
        tokens, rows = inputs.shape[0], batch.sample_rows
        if inputs.device.type == "cpu":
            inputs, rows = padded(inputs, self.dtype), padded(rows, self.dtype)
        given = {"input_ids" if self._embedding else "inputs_embeds": inputs[None]}
        position_ids = functional.pad(batch.positions, (0, inputs.shape[0] - tokens))[None]
        self.step.batch, self.step.positions = batch, position_ids
        try:
            if not self._head:
                hidden: torch.Tensor = self._base(**given, position_ids=position_ids, use_cache=False).last_hidden_state
                return hidden[0, :tokens]
            output = self.module(**given, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
            logits: torch.Tensor = output.logits[0, : batch.sample_rows.shape[0]].float()
            return logits
        finally:
            self.step.batch = self.step.positions = None

    def compute_some(self, inputs: torch.Tensor, batch: Batch, layers: range) -> torch.Tensor:
        """Those of its layers alone, numbered as in the whole model, without the head. inputs: token ids [tokens] where the slice embeds and the first of them is
        its first, else the inputs of the first of them, [tokens, hidden]. Returns what the last of them hands on (on a slice with the head its norm is
        worked in, and it means nothing).
        """
        own = range(self._layers[0], self._layers[1] + 1)
        embeds = self._embedding and layers.start == own.start
        tokens = inputs.shape[0]
        if inputs.device.type == "cpu":
            inputs = padded(inputs, self.dtype)
        position_ids = functional.pad(batch.positions, (0, inputs.shape[0] - tokens))[None]
        aside = {number: self._list[number] for number in own if number not in layers}
        self.step.batch, self.step.positions = batch, position_ids
        try:
            for number in aside:
                self._list[number] = self._outside()
            CHANGES.happened()
            given = {"input_ids" if embeds else "inputs_embeds": inputs[None]}
            hidden: torch.Tensor = self._base(**given, position_ids=position_ids, use_cache=False).last_hidden_state
            return hidden[0, :tokens]
        finally:
            self.step.batch = self.step.positions = None
            for number, layer in aside.items():
                self._list[number] = layer
            CHANGES.happened()

    def _outside(self) -> Outside:
        """What stands where another stage computes."""
        return OutsideInTuple() if self._config.model_type in _ANSWER_IN_TUPLES else Outside()

    @property
    def begins_anywhere(self) -> bool:
        """Whether `compute_some` can begin behind its first layer: with the embedding there may be more than a table before that one."""
        has_more = any(
            getattr(self._decoder, name, None) is not None for name in (*EMBEDDING_SIDE, "embedding_multiplier")
        )
        return not (self._embedding and has_more)

    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        """All that the libraries make kernels for in a step of this batch on a processor: what, its rows, its keys."""
        if not pads(self.dtype):  # the native library's room for a step's tokens
            return {("tokens", padded_rows(min(batch.tokens, TOKENS_AS_FLOATS)), 0)}
        linears = {("linears", padded_rows(batch.tokens), 0), ("head", padded_rows(len(batch.sample_rows)), 0)}
        return linears | {("attention", *size) for size in kernel_sizes(batch, self.step.rules.values())}

    def _cut(self) -> None:
        """Leave only this stage's modules in the model."""
        self._base = getattr(self.module, self._prefix)
        self._decoder, listed = _decoder(self._base, self._config.num_hidden_layers)
        self._list: nn.ModuleList = getattr(self._decoder, listed)
        self._list_path = next(path for path, module in self.module.named_modules() if module is self._list)
        first, last = self._layers
        for index in range(len(self._list)):
            if not first <= index <= last:
                self._list[index] = self._outside()
        table = self.module.get_input_embeddings()
        before = {name for name, child in self._decoder.named_children() if child is table}
        after = {name for name, child in self._decoder.named_children() if "norm" in name or _has_parameters(child)}
        after -= before | {listed, *EMBEDDING_SIDE}
        if not self._embedding:
            _replace(self._decoder, before)
            without_embedding_side(self._decoder)
        if not self._head:
            _replace(self._decoder, after)
            self.module.set_output_embeddings(Outside())

    def _divide(self, division: Division) -> None:
        """Leave only this rank's part in the stage's modules."""
        for number, places in self._places.items():
            divided = division.layer(self._list[number], f"{self._list_path}.{number}", places)
            self._places[number] = divided.places
            self.cuts |= divided.cuts
            self._rows |= divided.rows
            self._wanted -= divided.elsewhere
        shared = [self.module.get_output_embeddings()] * self._head
        shared += [self.module.get_input_embeddings()] * self._embedding
        paths = {module: path for path, module in self.module.named_modules()}
        for module in shared:
            self._rows |= {f"{paths[module]}.{name}": (division.vocabulary,) for name, _ in module.named_parameters()}
            division.shrink_table(module)

    def _find_linears(self) -> dict[int, dict[str, tuple[nn.Module, str]]]:
        """Layer -> key of a linear -> what holds it."""
        paths = {module: path for path, module in self.module.named_modules()}
        first, last = self._layers
        return {
            layer: {
                f"{paths[parent]}.{name}": (parent, name)
                for parent in self._list[layer].modules()
                for name, child in parent.named_children()
                if type(child) is nn.Linear
            }
            for layer in range(first, last + 1)
        }

    def _find_experts(self) -> dict[int, dict[str, tuple[nn.Module, str]]]:
        paths = {module: path for path, module in self.module.named_modules()}
        first, last = self._layers
        layers = {layer: self._list[layer] for layer in range(first, last + 1)}
        return {layer: fused_parameters(module, paths[module]) for layer, module in layers.items()}

    def _names(self, key: str) -> list[str]:
        """The parameters of the whole model that a checkpoint key fills, and those of this stage tied to them."""
        return self._renaming(key)[0]

    def _renaming(self, key: str) -> tuple[list[str], str | None]:
        """`_names`, and the pattern of the converter that the tensor goes through; None: it is the first of them as it is."""
        if key not in self._renamed:
            self._renamed[key] = self._renaming_of(key)
        return self._renamed[key]

    def _renaming_of(self, key: str) -> tuple[list[str], str | None]:
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._whole)
        if name not in self._whole and key in self._whole:
            return [key], None
        names = [name]
        if pattern is not None:
            converter = next(entry for entry in converters if pattern in entry.source_patterns)
            targets = converter.target_patterns
            names = [name.replace(targets[0], target) for target in targets]
        return names + [parameter for parameter, source in self._tied.items() if source in names], pattern

    def _own_name(self, key: str) -> str:
        """The key itself, unless it must fill a parameter that is tied to one of another stage."""
        names = self._names(key)
        if names[0] not in self._wanted:
            return next((name for name in names[1:] if name in self._wanted), key)
        return key

    def _filled_by_ties(self, found: set[str]) -> set[str]:
        """Parameters whose tied partner is on this stage too."""
        return {name for pair in self._tied.items() for name in pair if found.intersection(pair)}

    def _layer_of(self, name: str) -> int | None:
        number = name.removeprefix(f"{self._list_path}.").partition(".")[0]
        return int(number) if number.isdigit() else None


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _shape(parent: nn.Module, attribute: str) -> tuple[int, int]:
    linear: nn.Linear = getattr(parent, attribute)
    return linear.out_features, linear.in_features


def _on_meta(config: Any, dtype: torch.dtype) -> Any:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _BUILDING, contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        stack.enter_context(no_init_weights())  # of tensors without memory
        stack.enter_context(without_compiler())
        stack.enter_context(SmallOnCpu())
        try:
            model = model_class(config)
        except Exception as error:  # transformers looks fields up as it builds, with exceptions of several kinds
            raise InputError(
                f"config.json makes no model of '{config.model_type}' ({reason_of(error)}): correct that field, or fetch the model again"
            ) from error
    use_attention_of_pages(model)
    return model


def _decoder(base: Any, count: int) -> tuple[Any, str]:
    """The module that holds the layers, and what it calls them: the shallowest with such a list as long as the model is deep."""
    queue = [base]
    for module in queue:
        for name in LAYER_LISTS:
            layers = getattr(module, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                return module, name
        queue.extend(module.children())
    raise InputError(f"{type(base).__name__} has no list of {count} layers: report this model")


def _replace(parent: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        setattr(parent, name, Outside())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _set_parameter(module: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: a slot reports its own progress."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
