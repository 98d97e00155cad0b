"""The two sides of a load's stream: reading the units of a stage, and storing each in its format while the next one is read. Used by `load_stage`."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import BITS_OF_FORMAT, STORED_FORMATS, FormatName
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear, make_linear
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.formats.linear import check_weight
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.static8.static_linear import static_linear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.blocked import blocked_pair, can_block, dense_linear
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.difference import Difference
from strata_runtime.loading.expert_loader import ExpertLoader
from strata_runtime.loading.linear_source import ANY_FORMATS, LinearSource
from strata_runtime.loading.load_cache import LoadCache
from strata_runtime.loading.stored_linears import QuantizedCheckpoint
from strata_runtime.loading.stream import ahead
from strata_runtime.loading.units import AnyUnit, ExpertUnit, Unit
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.ranges import Range
from strata_runtime.ranks.cut import WHOLE, LinearCut
from strata_runtime.stopwatch import Stopwatch

_CPU = torch.device("cpu")


@dataclass
class _Piece:
    """What has been read of a unit. Emptied when it is stored: the next one is on its way already."""

    tensors: dict[str, Tensor]
    planes: PlanesWeight | None = None
    memory: Tensor | None = None  # that the weight lies in, to be read into again
    module: nn.Module | None = None  # the linear as a quantized checkpoint holds it
    expert: Tensor | QuantLinear | None = None


class Loader:
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

    def fill(
        self,
        difference: Difference,
        outside: Sequence[str],
        head_format: FormatName,
        missing: Sequence[AnyUnit],
        tell: Callable[[], None],
    ) -> None:
        """The stage: with what is held, then with what is missing, tensors `outside` its layers first. `tell` is called after each layer that was taken and each
        unit that was stored.
        """
        with self.watch.during("taking what is held"):
            difference.take_layers(self._stage, self._source, tell)
            is_all = difference.take_outside(self._stage)
        if not is_all:
            with self.watch.during("embedding and head"):
                self.load_outside(outside, head_format)
        difference.add_outside(self._stage)
        for unit in self.stream(missing):
            difference.add_unit(unit, self._stage, self._source)
            tell()

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

    def stream(self, units: Sequence[AnyUnit]) -> Iterator[AnyUnit]:
        """Loads them in order, each read while the one before is stored; yields each that is."""
        with contextlib.closing(ahead(partial(self.read, unit) for unit in units)) as pieces:
            for unit in units:
                with self.watch.during("reading"):  # longer than the one before was packed
                    piece = next(pieces)
                with self.watch.during("packing"):
                    self.store(unit, piece)
                yield unit

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
        """Embedding, last norm, head, as far as they are not there. While nothing else is loaded: the head takes its table twice."""
        keys = [key for key in keys if self._stage.lacks(key)]
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
