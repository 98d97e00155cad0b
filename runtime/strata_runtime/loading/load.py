"""Loading one role: from a checkpoint to a StageModel, linear by linear.

Called by the slot's prepare. While one linear is stored in its format and its dense weight freed, a thread reads the next one: beyond the
finished stage at most two linears are held as they were read, whatever the model's size (one layer where the checkpoint's tensors are not those of
the model, as merged experts). Bit-planes come from the model's any-precision copy where it has one, or from what earlier loads of this node kept, and
of that only the planes that the format needs; what a load quantizes itself it keeps there (`load_cache`). Tensors of other layers are not read; files are read, not mapped, so that stages of one machine share the page cache and no more.
"""

import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.divided import DIVIDED_FORMATS
from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, STORED_FORMATS, FormatName
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import switches, why_not_switched
from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES, QuantLinear, make_linear
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.formats.linear import check_weight
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.static8.activation_file import activations_of
from strata_runtime.formats.static8.static_linear import static_linear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.artefact import Artefact, DamagedError, find_artefact
from strata_runtime.loading.blocked import blocked_pair, can_block, dense_linear
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.drafts import add_drafts
from strata_runtime.loading.expert_loader import ExpertLoader
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.loading.load_cache import LoadCache
from strata_runtime.loading.quantized import quantized_checkpoint, read_model_config
from strata_runtime.loading.shared_layers import share_layers
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.stored_linears import QuantizedCheckpoint
from strata_runtime.loading.stream import ahead
from strata_runtime.loading.units import AnyUnit, ExpertUnit, Unit, units_of
from strata_runtime.loading.verify import Beside, at_once, never
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.model.experts import use_padded_experts
from strata_runtime.ranges import Range
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.cut import WHOLE, LinearCut
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.stopwatch import Stopwatch

log = logging.getLogger(__name__)

ANY_FORMATS = frozenset({*ANY_PRECISION.values(), "any4_a8"})
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a stage is loaded.

    keep: layers that are quantized at any precision for want of a copy stay in the node's cache, for the next load; what is there is read either way.
    verify: planes and tables are compared with the checks of their copy as they are read, all of them before the load ends. Of what the node keeps, a layer
    that is damaged is quantized anew.
    collectives: where several ranks share the stage: the part of this one alone is loaded, and only its bytes are read where a format allows.
    """

    keep: bool = False
    verify: bool = True
    collectives: Collectives | None = None


def load_stage(
    role: Role,
    model_path: Path,
    progress: Callable[[int, int], None],
    device: torch.device,
    options: LoadOptions = LoadOptions(),
) -> StageModel:
    """The role's layers from the folder `model_path`, on `device`. `progress(done, total)` counts whole layers, and is called after each linear.

    Raises UnsupportedModelError for what the engine or a format cannot do, InputError for a checkpoint or an any-precision copy that is damaged,
    incomplete, of another model, or does not have the role's layers.
    """
    while True:
        try:
            return _load(role, model_path, progress, device, options)
        except _ForgottenError:
            continue  # one damaged file less


class _ForgottenError(Exception):
    """A file of what the node keeps was damaged, and is no more."""


def _load(
    role: Role,
    model_path: Path,
    progress: Callable[[int, int], None],
    device: torch.device,
    options: LoadOptions,
) -> StageModel:
    config = read_model_config(model_path)
    check_formats(config.to_dict(), role.format)
    first, last = role.layers
    if last >= config.num_hidden_layers:
        raise InputError(
            f"role asks for layers {first}..{last}; {model_path} has {config.num_hidden_layers}: plan again"
        )
    dtype = COMPUTE_DTYPES[role.compute_type]
    checkpoint = quantized_checkpoint(model_path) or Checkpoint(model_path)
    if options.collectives is not None:
        _check_divisible(role)
    watch = Stopwatch()
    with watch.during("model without weights"):
        stage = ModelSlice(
            config, role.layers, embedding=role.embedding, head=role.head, dtype=dtype, collectives=options.collectives
        )
    use_padded_experts(stage.module)
    checkpoint.transposed = stage.transposed(checkpoint.keys)
    sources = stage.sources(checkpoint.keys)
    checkpoint.check(key for keys in sources.values() for key in keys)
    formats = dict(zip(range(first, last + 1), role.format, strict=True))
    units = [
        unit for layer, name in formats.items() for unit in units_of(stage, checkpoint, layer, name, sources[layer])
    ]
    plain = [unit for unit in units if isinstance(unit, Unit)]
    weights = {unit.key: unit.tensors["weight"] for unit in plain if unit.key}
    wanted = [layer for layer, name in formats.items() if name in ANY_FORMATS or has_draft(name, role.speculation)]
    artefact, cache = _copies(wanted, model_path, stage, plain, config.num_hidden_layers, keep=options.keep)
    source = LinearSource(checkpoint, artefact, weights, dtype, stage.cuts)
    if "w8a8_static" in role.format:
        source.activations = activations_of(model_path, model_digest(model_path))
    loader = _Loader(stage, checkpoint, source, cache, dtype, device)
    loader.prepare_memory(plain)
    stage.initialise_buffers(device)
    with (
        freed_at_once(),
        _forgetting(cache),
        cache or contextlib.nullcontext(),
        _checking(artefact, verify=options.verify),
    ):
        with loader.watch.during("embedding and head"):
            loader.load_outside(sources.get(None, ()), role.head_format)
        for layers in loader.stream(units):
            progress(layers, last - first + 1)
        stage.finish()
        model = StageModel(stage, num_layers=last - first + 1, device=device, source=source)
        can_switch = switches(role.strategies) and not why_not_switched(config.model_type, role.format, device.type)
        if isinstance(options.collectives, SharedMemory) and can_switch:
            with loader.watch.during("weights for all ranks"):
                model.switch = share_layers(stage, range(first, last + 1), options.collectives)
        add_drafts(model, role, cache, lambda: progress(last - first + 1, last - first + 1))
    if source.artefact is not None and not source.artefact.manifest.files:
        source.artefact = None
    watch.tell(log)
    loader.watch.tell(log)
    return model


def _check_divisible(role: Role) -> None:
    """Raises InputError for what ranks cannot share."""
    wrong = sorted({name for name in role.format if name not in DIVIDED_FORMATS})
    if wrong:
        raise InputError(
            f"a stage over several devices is stored in {', '.join(DIVIDED_FORMATS)}, not in {', '.join(wrong)}: allow other bits, or stages of one "
            "device each"
        )


@contextlib.contextmanager
def _checking(artefact: Artefact | None, *, verify: bool) -> Iterator[None]:
    """What is read of a copy is checked by threads beside the load; later, when a layer changes its bits, by whoever reads."""
    if artefact is None:
        yield
    elif not verify:
        log.warning("%s is not compared with its checks (--no-verify): damaged planes would be served", artefact.folder)
        artefact.checked = never
        yield
    else:
        try:
            with Beside() as artefact.checked:
                yield
        finally:
            artefact.checked = at_once


@contextlib.contextmanager
def _forgetting(cache: LoadCache | None) -> Iterator[None]:
    """Raises _ForgottenError in the place of DamagedError where a file could be let go."""
    try:
        yield
    except DamagedError as error:
        if cache is None or not cache.forget(error):
            raise
        raise _ForgottenError from None


@dataclass
class _Piece:
    """What has been read of a unit. Emptied when it is stored: the next one is on its way already."""

    tensors: dict[str, Tensor]
    planes: PlanesWeight | None = None
    memory: Tensor | None = None  # that the weight lies in, to be read into again
    module: nn.Module | None = None  # the linear as a quantized checkpoint holds it
    expert: Tensor | QuantLinear | None = None


def _copies(
    wanted: Sequence[int],
    model_path: Path,
    stage: ModelSlice,
    units: Sequence[Unit],
    layers: int,
    *,
    keep: bool,
) -> tuple[Artefact | None, LoadCache | None]:
    """The model's any-precision copy; where a layer is wanted of it, its file is found whole first. Without one, what loads of this node keep.

    A copy that cannot be used is refused by name, unless no layer needs it.
    """
    try:
        artefact = find_artefact(model_path)
        if artefact is not None:
            artefact.check(wanted)
            return artefact, None
    except InputError as error:
        if wanted:
            raise
        log.warning("precision cannot be changed while the stage runs: %s", error)
        return None, None
    shapes: dict[int, dict[str, tuple[int, int]]] = {layer: {} for layer in wanted}
    for unit in units:
        if unit.key and unit.layer in shapes:
            shapes[unit.layer][unit.key] = stage.whole_shape(unit.layer, unit.key)
    plain = {layer: linears for layer, linears in shapes.items() if linears.keys() == stage.places(layer).keys()}
    cache = LoadCache(model_path, layers, plain, keep=keep)
    return cache.artefact, cache


class _Loader:
    """The two sides of the stream: `read` in the reading thread, the rest in the one that loads. A linear's memory goes from the one to the
    other and back: as only one is read while one is stored, there are two of them.
    """

    def __init__(
        self,
        stage: ModelSlice,
        checkpoint: Checkpoint,
        source: LinearSource,
        cache: LoadCache | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.watch = Stopwatch()
        self._stage = stage
        self._checkpoint = checkpoint
        self._source = source
        self._cache = cache
        self._dtype = dtype
        self._device = device
        checkpoint.pinned = device.type == "cuda"
        if source.artefact is not None:
            source.artefact.pinned = checkpoint.pinned
        self._spare: deque[Tensor] = deque()
        self._spare_bytes = 0
        self._experts = ExpertLoader(stage, checkpoint, dtype, device)

    def prepare_memory(self, units: Iterable[Unit]) -> None:
        """How large the memory must be that linears are read into again and again, as long as their stored form has memory of its
        own: fresh pages cost three times what copying from the page cache into old ones does.
        """
        copied = [unit for unit in units if unit.key and self._is_copied(unit)]
        sizes = (self._checkpoint.size_bytes(unit.tensors["weight"], self._type_of(unit)) for unit in copied)
        self._spare_bytes = max(sizes, default=0)

    def read(self, unit: AnyUnit) -> _Piece:
        """On the CPU."""
        if isinstance(unit, ExpertUnit):
            return _Piece({}, expert=self._experts.read(unit))
        wanted, planes = dict(unit.tensors), None
        if unit.key and unit.format in STORED_FORMATS and isinstance(self._checkpoint, QuantizedCheckpoint):
            shape = self._stage.whole_shape(unit.layer, unit.key)
            return _Piece({}, module=self._checkpoint.read_linear(wanted, shape, self._dtype, self._cut(unit)))
        tensors, memory = {}, None
        if unit.key and unit.format in ANY_FORMATS and self._is_kept(unit.layer):
            planes = self._source.planes(unit.key, BITS_OF_FORMAT[unit.format])
            del wanted["weight"]
        elif unit.key:
            tensors["weight"], memory = self._read_weight(unit, wanted.pop("weight"))
        rows = self._cut(unit).rows
        if rows and "bias" in wanted:
            tensors["bias"] = self._checkpoint.read_part(wanted.pop("bias"), self._dtype, rows)
        for name, own in self._stage.rows_of(wanted.values() if unit.key is None else ()).items():
            tensors[name] = self._checkpoint.read_part(wanted.pop(name), self._stage.type_of(name), own)
        by_type: dict[torch.dtype, list[str]] = defaultdict(list)
        for name in wanted.values():
            by_type[self._stage.type_of(name)].append(name)
        read: dict[str, Tensor] = {}
        for dtype, names in by_type.items():
            read |= self._checkpoint.read(names, dtype, _CPU)
        return _Piece(tensors | {what: read[name] for what, name in wanted.items()}, planes, memory)

    def _read_weight(self, unit: Unit, name: str) -> tuple[Tensor, Tensor | None]:
        """With the memory that it lies in, if that is to be read into again."""
        cut = self._cut_while_reading(unit)
        if cut != WHOLE:
            return self._checkpoint.read_part(name, self._type_of(unit), cut.rows, cut.columns), None
        if not self._is_copied(unit):
            return self._checkpoint.read([name], self._type_of(unit), _CPU)[name], None
        memory = self._spare.pop() if self._spare else torch.empty(self._spare_bytes, dtype=torch.uint8)
        return self._checkpoint.read_into(name, self._type_of(unit), memory), memory

    def _cut(self, unit: Unit) -> LinearCut:
        return self._source.cuts.get(unit.key or "", WHOLE)

    def _cut_while_reading(self, unit: Unit) -> LinearCut:
        """What of its cut a weight is read with: a format that keeps something of whole rows sees them whole, as does what a node keeps."""
        cut = self._cut(unit)
        if unit.format == "dense":
            return cut
        return WHOLE if self._is_added(unit) else LinearCut(rows=cut.rows)

    def _is_added(self, unit: Unit) -> bool:
        """Whether the planes of a linear are added to what the node keeps."""
        return self._cache is not None and unit.format in ANY_FORMATS and self._cache.wants(unit.layer)

    def _is_kept(self, layer: int) -> bool:
        """Whether the layer's planes are read."""
        return self._source.artefact is not None if self._cache is None else self._cache.has(layer)

    def _type_of(self, unit: Unit) -> torch.dtype | None:
        """That the weight of a linear is read in. At any precision as it is stored, so that planes do not depend on who made them first."""
        return None if unit.format in ANY_FORMATS else self._dtype

    def _is_copied(self, unit: Unit) -> bool:
        """Whether the stored form of a linear takes nothing of the memory that its weight was read into."""
        if self._device.type != "cpu" or type(self._checkpoint) is not Checkpoint:
            return False
        return unit.format != "dense" or can_block(self._dtype, self._device)

    def stream(self, units: Sequence[AnyUnit]) -> Iterator[int]:
        """Loads them in order, each read while the one before is stored; yields after each how many layers are whole."""
        whole = 0
        with contextlib.closing(ahead(partial(self.read, unit) for unit in units)) as pieces:
            for unit in units:
                with self.watch.during("reading"):  # longer than the one before was packed
                    piece = next(pieces)
                with self.watch.during("packing"):
                    self.store(unit, piece)
                whole += unit.ends_layer
                yield whole

    def store(self, unit: AnyUnit, piece: _Piece) -> None:
        """On the device, in the unit's format. Empties the piece."""
        if isinstance(unit, ExpertUnit):
            read, piece.expert = piece.expert, None
            assert read is not None
            self._experts.store(unit, read)
            return
        if unit.key is None:
            tensors = {name: self._moved(piece.tensors.pop(name)) for name in tuple(piece.tensors)}
            self._stage.load(tensors, self._device)
            self._store_filled(unit)
            return
        parent, attribute = self._stage.places(unit.layer)[unit.key]
        if piece.module is not None:
            module, piece.module = piece.module.to(self._device), None
            if isinstance(module, GptqLinear):
                module.settle(self._dtype)
            setattr(parent, attribute, module)
            return
        weight, bias, planes = (piece.tensors.pop("weight", None), piece.tensors.pop("bias", None), piece.planes)
        piece.planes = None
        cut = self._cut(unit) if planes is not None else self._cut_while_reading(unit)
        shape = self._stage.shape_of(unit.layer, unit.key, cut)
        _check_shapes(unit.key, shape, getattr(parent, attribute), weight if planes is None else planes, bias)
        bias = None if bias is None else self._moved(bias)
        if planes is not None:
            moved = PlanesWeight(
                tuple(self._moved(plane) for plane in planes.planes), self._moved(planes.table), planes.in_features
            )
            stored: nn.Module = AnyLinear(moved, bias, unit.format)
        else:
            assert weight is not None
            stored = self._quantized(unit, self._moved(weight), bias)
        setattr(parent, attribute, stored)
        if piece.memory is not None:
            self._spare.append(piece.memory)
            piece.memory = None

    def _quantized(self, unit: Unit, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """A linear whose dense weight has been read, kept for the next load where that is wanted."""
        assert unit.key
        if self._cache is None or not self._is_added(unit):
            columns = None if unit.format == "dense" else self._cut(unit).columns
            return self._stored(weight, bias, unit.format, unit.key, columns)
        check_weight(weight, bias, unit.format, self._dtype, unit.key)
        planes = self._cache.quantized(unit.layer, unit.key, weight, BITS_OF_FORMAT[unit.format], self._dtype)
        return AnyLinear(self._source.part(unit.key, planes), bias, unit.format)

    def load_outside(self, keys: Sequence[str], head_format: FormatName) -> None:
        """Embedding, last norm, head. While nothing else is held: the head takes its table twice."""
        rows = self._stage.rows_of(keys)
        parts = {key: self._checkpoint.read_part(key, self._dtype, own).to(self._device) for key, own in rows.items()}
        whole = self._checkpoint.read([key for key in keys if key not in parts], self._dtype, self._device)
        self._stage.load(whole | parts, self._device)
        self._stage.tie()
        for parent, attribute, head in self._stage.own_head(shared=head_format != "dense"):
            self._replace(parent, attribute, head, head_format, attribute)
        self._stage.share_table(blocked_pair)

    def _store_filled(self, unit: Unit) -> None:
        """The linears whose weights were converted on their way."""
        for parent, attribute, linear in self._stage.linears(unit.layer):
            if not any(parameter.is_meta for parameter in linear.parameters()):
                self._replace(parent, attribute, linear, unit.format, f"{attribute} of layer {unit.layer}")

    def _replace(self, parent: nn.Module, attribute: str, linear: nn.Linear, name: FormatName, called: str) -> None:
        parameters = {what: parameter.data for what, parameter in linear.named_parameters()}
        stored = self._stored(parameters.pop("weight"), parameters.get("bias"), name, called)
        setattr(parent, attribute, stored)
        linear.weight = None  # type: ignore[assignment]  # freed now, not when all are done

    def _stored(
        self, weight: Tensor, bias: Tensor | None, name: FormatName, called: str, columns: Range | None = None
    ) -> nn.Module:
        if name == "dense":
            return dense_linear(weight, bias)
        if name == "w8a8_static":
            entry = self._source.activation_entry(called)
            return static_linear(weight, bias, entry, self._dtype, name=called, columns=columns)
        return make_linear(weight, bias, name, self._dtype, name=called, columns=columns)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _check_shapes(
    key: str, shape: tuple[int, int], linear: nn.Linear, weight: Tensor | PlanesWeight | None, bias: Tensor | None
) -> None:
    """Of what was read against those that config.json gives. `shape`: of what is read of the weight."""
    expected = list(shape)
    if isinstance(weight, PlanesWeight):
        found = [weight.out_features, weight.in_features]
    else:
        found = expected if weight is None else list(weight.shape)
    if found != expected or (bias is not None and list(bias.shape) != [linear.out_features]):
        raise InputError(
            f"the checkpoint does not fit config.json: {key} has the shape {found}, {expected} is expected"
        )
