"""What a stage holds beside weights and KV, term by term: kernels, what a step has alive at once, what loading adds.

Called for every stage that is considered. Follows the runtime moment by moment, for any decoder-only model: nothing is
fitted to a model or a slice; constants are measured on single products or the runtime's own. Counts no weights and no KV pool: `memory` does. Source of the model: LLM-PQ (arXiv
2403.01136) section 4.1, "peak temporaries", with the moments of real layers in place of a factor.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from strata_planner.contract.architectures import ROUTING
from strata_planner.contract.formats import ANY_PRECISION, COMPUTE_TYPE_BYTES, FORMAT_NAMES, ComputeType, FormatName
from strata_planner.contract.rows import FEW_ROWS, MANY_ROWS, TOKENS_AS_FLOATS, padded_rows
from strata_planner.contract.sequence_state import SequenceState
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Accelerator
from strata_planner.question.linear import Linear
from strata_planner.question.model import MLP_IN, LayerShape, Model

# Of the libraries. A role's modules take 1.3 MiB in a process; sockets and threads of an epoch are assumed to take the
# rest. What oneDNN keeps for every pair of a weight's shape and a number of rows in 16-bit types is the growth of glibc's
# count of used bytes over single products (0.59 to 0.67 MiB, whatever the shape); what MKL packs of a weight for a product in float32 is at most 4.8 MiB.
MODULE_BYTES = 3 << 20
KERNEL_BYTES = 665 << 10
FLOAT32_BUFFER_BYTES = 5 << 20
FRAMES_UNDER_WAY = 3  # of hidden states: the one that is computed, the next one, and its copy while it is encrypted

# The runtime's own: keys and values (cache.batch), scores written out and a mask's rows in the compute type (cache.attention) at
# once; rows of an expert at once (loading.experts); tokens of a sequence that pass a state at once (model.mixers); weights brought back to the compute type at once, in so many bytes each (precision).
GATHERED_BYTES = 16 << 20
SCORES_BYTES = 8 << 20
MASK_BYTES, MASK_ROWS = 4 << 20, 256
FEWEST_KEYS, WIDE = 64, 256  # keys of scores written out are padded to powers of two between these, beyond to multiples
WRITTEN_OUT = frozenset({"bloom", "gemma2", "gpt_oss"})  # architectures whose attention is not torch's own
# Widths of a head that the native library attends with, on processors for which it packs 16-bit weights: multiples of the one up to the other.
HEAD_LANES, WIDEST_HEAD = 16, 256
EXPERT_ROWS = 128
STATE_TOKENS = 256  # of one sequence that pass a layer with state at once (model.mixers)
CONVERTED_AT_A_TIME = 1 << 21
CONVERTED_AT_A_TIME_ON_CUDA = 1 << 26
FLOAT8 = frozenset({"fp8_e4m3", "fp8_a8", "fp8_block"})
FLOAT8_AT_A_TIME = 1 << 20
FLOAT8_BYTES_PER_WEIGHT = 8  # twice as 16 bits on the way to float32; rounded and blocked then, they are fewer
GROUPS_BYTES_PER_WEIGHT = 4.5
GROUPS_BYTES_PER_WEIGHT_IN_FLOAT32 = 5.25  # the product takes them as they are
# Up to so many rows a weight is multiplied as it is stored, by kernels that keep nothing (precision.kernels), where no device's profile says otherwise.
_ANY_ROWS = 1 << 30
PACKED_ROWS: dict[FormatName, int] = {
    **dict.fromkeys(FORMAT_NAMES, 0),
    **dict.fromkeys(ANY_PRECISION.values(), 64),
    **dict.fromkeys(("w8a8", "w8a8_static", "any4_a8"), _ANY_ROWS),
    "int8": 16,
    "int4": 48,
    "int3": 48,
}
_FLOAT32 = 4
STATE_CHUNK = 64  # tokens of a prompt that are multiplied with each other
_ATTENTION_PRODUCTS = 2  # scores, and what they weigh
_FEW_ROWS = 2  # numbers of rows below the fewest keys: 16 and 32


class StepShape(NamedTuple):
    """The largest step: `tokens` of all segments, `sampled` rows that want logits, `context` keys of one sequence."""

    tokens: int
    sampled: int
    context: int


@dataclass(frozen=True)
class Storage:
    """How a stage stores its layers and its KV, and where: a processor's memory or a GPU's."""

    formats: frozenset[FormatName]
    compute_type: ComputeType
    on_cpu: bool
    kv_bits: int = 16
    packed_rows: frozenset[tuple[FormatName, int]] = frozenset()  # of the device's profile
    pads_rows: bool = True  # likewise: a processor that keeps kernels

    @classmethod
    def on(
        cls, device: Accelerator, formats: frozenset[FormatName], compute_type: ComputeType, kv_bits: int
    ) -> "Storage":
        packed_rows = frozenset(device.profile.packed_rows.items())
        on_cpu = device.name == CPU
        return cls(formats, compute_type, on_cpu, kv_bits, packed_rows, on_cpu and device.profile.pads(compute_type))

    @property
    def item(self) -> int:
        return COMPUTE_TYPE_BYTES[self.compute_type]

    def attends_in_place(self, layer: LayerShape) -> bool:
        """Whether keys and values are read where they lie: by the native library, which also packs 16-bit weights."""
        packs = self.on_cpu and self.compute_type == "bfloat16" and dict(self.packed_rows).get("dense", 0) > 0
        return packs and not layer.latent and layer.head_dim % HEAD_LANES == 0 and layer.head_dim <= WIDEST_HEAD

    def rows(self, tokens: int) -> int:
        """That so many are multiplied in."""
        return padded_rows(tokens) if self.pads_rows and self.on_cpu else tokens

    @property
    def packed_by_product(self) -> int:
        return FLOAT32_BUFFER_BYTES * (self.on_cpu and self.item == _FLOAT32)


@dataclass(frozen=True)
class WorkingMemory:
    """Peak bytes of a stage beside stored weights and KV. What is alive together is added, what follows is not."""

    modules: int  # a role's objects in the process
    kernels: int  # kept by oneDNN for every row number that steps within the plan's limits can have; or by the native library for its products
    stream: int  # hidden states: the frame, its padded copy, the stream, its normalised copy, frames in sockets
    layer: int  # the worst moment of the worst layer: norm, rotation, attention, MLP, weights brought back; with the heap's holes
    logits: int  # of the sampled rows, in the compute type and in float32 (last stage)
    loading: int  # while loading: a linear not yet quantized, experts not yet merged; KV is not there yet

    @property
    def serving(self) -> int:
        return self.modules + self.kernels + self.stream + max(self.layer, self.logits)

    def peak(self, kv_bytes: int) -> int:
        """Beside weights and `kv_bytes` of KV: while serving, or while loading where that is more than the KV makes up."""
        return max(self.serving, self.loading - kv_bytes)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def working_memory(model: Model, step: StepShape, storage: Storage, *, head: bool) -> WorkingMemory:
    """The worst layer's terms at the worst of the formats. On CUDA the framework's own share is in its overhead."""
    tokens = storage.rows(step.tokens)
    layers = set(model.layers)
    stream = (4 * tokens + FRAMES_UNDER_WAY * step.tokens) * model.hidden_size * storage.item
    written_out = model.architecture in WRITTEN_OUT
    layer = max(
        _Layer(each, tokens, step, storage, model.hidden_size, written_out=written_out).worst for each in layers
    )
    logits = _logits_bytes(model, step, storage) if head else 0
    return WorkingMemory(
        modules=MODULE_BYTES * storage.on_cpu,
        kernels=_kernel_bytes(model, step, storage, head=head) if storage.on_cpu else 0,
        stream=stream,
        layer=layer,
        logits=logits,
        loading=max(_loading_bytes(each, storage) for each in layers) + MODULE_BYTES * storage.on_cpu,
    )


def row_numbers(least: int, most: int) -> int:
    """How many numbers of rows the runtime multiplies between `least` and `most`, rounded up."""
    largest = padded_rows(most)
    few = bisect_right(FEW_ROWS, largest) - bisect_left(FEW_ROWS, least)
    many = largest // MANY_ROWS - max(FEW_ROWS[-1], least - 1) // MANY_ROWS
    return max(0, few) + max(0, many)


def _logits_bytes(model: Model, step: StepShape, storage: Storage) -> int:
    """float32 ones are made from those of the compute type, where that differs."""
    rounded = 0 if storage.item == _FLOAT32 else storage.item
    return storage.rows(step.sampled) * model.vocab_size * (rounded + _FLOAT32) + storage.packed_by_product


def _kernel_bytes(model: Model, step: StepShape, storage: Storage, *, head: bool) -> int:
    """Once for each shape of a weight and each number of rows: what a slot that serves any requests ends up with. Where nothing is padded nothing
    is kept of numbers of rows; the native library keeps room for a step's tokens.
    """
    if storage.item == _FLOAT32:
        return 0
    if not storage.pads_rows:
        widest = max(linear.in_features for layer in set(model.layers) for linear in layer.linears)
        return min(step.tokens, TOKENS_AS_FLOATS) * max(widest, head * model.embedding_size) * _FLOAT32
    decays = _decays(model)
    linears = {linear for layer in set(model.layers) for linear in layer.linears} - decays
    packed_rows = PACKED_ROWS | dict(storage.packed_rows)
    kernels = head * row_numbers(packed_rows[model.head_format] + 1, step.sampled) + _product_kernels(
        linears, step, packed_rows, storage
    )
    if any(layer.latent for layer in model.layers):  # queries into the latents' width, and values out of it
        kernels += 2 * row_numbers(1, step.tokens)
    # And the router's.
    kernels += row_numbers(1, step.tokens) * (len(decays) + any(each.copies > 1 for each in linears))
    if model.architecture in WRITTEN_OUT and not all(map(storage.attends_in_place, model.layers)):
        kernels += _ATTENTION_PRODUCTS * (_FEW_ROWS + _key_numbers(step.tokens) + _key_numbers(step.context))
    return kernels * KERNEL_BYTES


def _decays(model: Model) -> set[Linear]:
    """What says how fast states decay: plain weights to the runtime, multiplied by torch's own product."""
    layers = (layer for layer in set(model.layers) if layer.state)
    return {each for layer in layers for each in layer.linears if not each.quantizable and each.name not in ROUTING}


def _product_kernels(
    linears: Iterable[Linear], step: StepShape, packed_rows: Mapping[FormatName, int], storage: Storage
) -> int:
    """Of each linear in the formats that it has in some layer; of experts some rows at a time."""
    # Rows of each shape of a product, by how many of them it takes packed.
    most: dict[tuple[int, tuple[FormatName, int, int]], int] = {}
    for linear in linears:
        is_expert = linear.copies > 1
        rows = min(step.tokens, EXPERT_ROWS) if is_expert else step.tokens
        for name in {linear.format_in(each) for each in storage.formats}:
            packed = PACKED_ROWS["dense"] if is_expert and name == "dense" else packed_rows[name]
            for shape in _product_shapes(linear, name):
                most[packed, shape] = max(rows, most.get((packed, shape), 0))
    return sum(row_numbers(packed + 1, rows) for (packed, _), rows in most.items())


def _key_numbers(most: int) -> int:
    """To how many numbers keys are padded where scores are written out: powers of two from `FEWEST_KEYS`, then multiples of `WIDE`."""
    narrow = max(0, (min(most, WIDE) - 1).bit_length() - (FEWEST_KEYS - 1).bit_length())
    return 1 + narrow + max(0, -(-most // WIDE) - 1)


def _product_shapes(linear: Linear, name: FormatName) -> set[tuple[FormatName, int, int]]:
    """Shapes of what is multiplied at once: the weight, or the pieces that a quantized one is brought back in."""
    at_once = linear.out_features if name == "dense" else min(linear.out_features, _piece_rows(linear, name))
    sizes = {at_once, linear.out_features % at_once} - {0}
    return {(name, size, linear.in_features) for size in sizes}


def _piece_rows(linear: Linear, name: FormatName) -> int:
    """Rows of a weight that are brought back at once: whole blocks of 64 where weights are packed in groups."""
    if name in FLOAT8:
        return max(1, FLOAT8_AT_A_TIME // linear.in_features)
    rows = max(1, CONVERTED_AT_A_TIME // linear.in_features)
    return rows if name in {"int8", "w8a8"} else max(64, rows // 64 * 64)


def _loading_bytes(layer: LayerShape, storage: Storage) -> int:
    """The largest linear is there as it was read while it is quantized or rearranged, and so is one expert at a time that is quantized;
    experts that are merged in 16 bits are there unmerged, and their gates and ups stacked once more before they lie side by side.
    """
    merged = [each for each in layer.linears if each.copies > 1 and _stays_dense(each, storage)]
    alone = [each for each in layer.linears if each.copies == 1 or not _only_dense(each, storage)]
    largest = max((each.out_features * each.in_features for each in alone), default=0)
    together = 2 * max((each.copies * each.out_features * each.in_features for each in merged), default=0)
    pieces = 0 if storage.formats == {"dense"} else _converted_at_once(largest, storage) * GROUPS_BYTES_PER_WEIGHT
    return int(max(largest * storage.item + pieces, together * storage.item))


def _stays_dense(linear: Linear, storage: Storage) -> bool:
    """In some layer of the stage."""
    return any(linear.format_in(name) == "dense" for name in storage.formats)


def _only_dense(linear: Linear, storage: Storage) -> bool:
    return all(linear.format_in(name) == "dense" for name in storage.formats)


def _converted_at_once(weights: int, storage: Storage) -> int:
    return min(weights, CONVERTED_AT_A_TIME if storage.on_cpu else CONVERTED_AT_A_TIME_ON_CUDA)


class _Layer:
    """One layer's moments in bytes, beside the stream."""

    def __init__(
        self,
        layer: LayerShape,
        tokens: int,
        step: StepShape,
        storage: Storage,
        hidden: int,
        *,
        written_out: bool = False,
    ) -> None:
        self._layer, self._step, self._storage = layer, step, storage
        self._row = tokens * storage.item  # bytes of one value of every token
        self._tokens = tokens
        self._hidden = hidden
        self._written_out = written_out
        self._in_place = storage.attends_in_place(layer)
        self._queries, self._keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        names = {linear.name for linear in layer.linears}
        self._fused_qkv, self._fused_mlp = "qkv_proj" in names, "gate_up_proj" in names
        self._routed = [linear for linear in layer.linears if linear.copies > 1]  # experts
        self._gated = bool({"gate_proj", "gate_up_proj"} & names)

    @property
    def worst(self) -> int:
        mlp = self._experts(self._routed) if self._routed else self._mlp()
        mixing = self._mixing(self._layer.state) if self._layer.state else self._attention()
        return max(self._norm() + self._hole, mixing + self._hole, mlp)

    @property
    def _plain(self) -> list[Linear]:
        return [linear for linear in self._layer.linears if linear.copies == 1]

    @property
    def _hole(self) -> int:
        """What glibc's heap loses where gate and up are apart. For an aligned block `posix_memalign` wants some bytes more than the block has (glibc 2.36,
        `_int_memalign`), so the hole that a freed tensor leaves is too small for the next one of its size: up does not find gate's, and stays beyond it.
        """
        apart = self._gated and not self._fused_mlp and not self._routed and self._storage.on_cpu
        return self._layer.mlp_width * self._row // 2 * apart

    def _norm(self) -> int:
        """In float32: the stream, its square or its scaled copy; then rounded. The normalised copy is not there yet."""
        return self._tokens * self._hidden * (2 * _FLOAT32)

    def _attention(self) -> int:
        """Queries, keys and values; rotated: q, q cos, turned q, its product with sin; then attended; then projected."""
        queries, keys = self._queries, self._keys
        whole = (queries + keys) * self._fused_qkv * self._row  # fused projections stay while their parts are copied
        rotating = (4 * queries + 2 * keys) * self._row
        # The step's own keys and values, as later steps will see them.
        rounded = 2 * keys * (self._storage.kv_bits < 16)
        attending = (3 * queries + 2 * keys + rounded) * self._row + self._gathered() + self._mask() + self._scores()
        projecting = (2 * queries + 2 * keys + self._hidden) * self._row + self._brought_back(self._plain, self._tokens)
        return whole + max(rotating, attending, projecting)

    def _mixing(self, state: SequenceState) -> int:
        """Of a layer with state: what is projected and its copy by rows, and what is made of it; of some tokens of a sequence, or of all that
        decode, copies in float32 and of the state; then normalised in float32; then projected.
        """
        values = state.heads * state.value_dim or state.channels
        projected = 3 * (state.channels + values) * self._row
        multiplied = state.heads * (5 * state.key_dim + 5 * state.value_dim + 4 * STATE_CHUNK)
        rows = max(4 * state.channels, state.channels + multiplied)
        passing = (min(self._tokens, STATE_TOKENS) * rows + 4 * state.matrix_values) * _FLOAT32
        window = state.channels * ((2 * state.inputs + 1) * self._storage.item + 2 * _FLOAT32)
        # A processor moves states where they lie.
        gathered = 2 * state.matrix_values * _FLOAT32 * (not self._storage.on_cpu)
        decoding = self._step.sampled * (window + gathered)
        normalising = 4 * self._tokens * values * _FLOAT32 * bool(state.heads)
        projecting = self._hidden * self._row + self._brought_back(self._plain, self._tokens)
        return projected + max(passing, decoding, normalising, projecting)

    def _gathered(self) -> int:
        """Pages of the pool: of a chunk with a past, or of a group of decoding sequences; at 8 bits as codes first."""
        if self._in_place:
            return 0
        one = 2 * self._step.context * self._keys * self._storage.item
        chunk = one if self._step.context > self._step.tokens else 0
        gathered = max(chunk, min(GATHERED_BYTES, self._step.sampled * one))
        return gathered + gathered // self._storage.item * (self._storage.kv_bits < 16)

    def _mask(self) -> int:
        """Of the longest chunk that has a past: which keys each token sees, and some rows of that in the compute type."""
        if self._in_place:
            return 0
        rows = max(0, min(self._step.tokens, self._step.context - self._step.tokens + self._step.sampled))
        row = self._step.context * self._storage.item
        return rows * self._step.context + min(rows * row, max(MASK_BYTES, MASK_ROWS * row))

    def _scores(self) -> int:
        """Where they are written out: some rows of them, and padded copies of queries, keys and values. A group of decoding
        sequences, gathered while no scores of a chunk are there, holds more than that or less.
        """
        if not self._written_out or self._in_place:
            return 0
        copies = 2 * self._step.context * self._keys * self._storage.item
        return max(0, copies + self._queries * self._row + SCORES_BYTES - self._gathered())

    def _mlp(self) -> int:
        """Fused gates and ups stay while what comes of them is projected. Apart they make three blocks of a size and two holes."""
        width = self._layer.mlp_width * self._row
        fused = self._gated and self._fused_mlp
        acting = (1.5 if self._gated and not fused else 2) * width
        brought_back = self._brought_back(self._plain, self._tokens)
        projecting = (1.5 * width + self._hidden * self._row if fused else width) + brought_back
        return int(max(acting + 2 * self._hole, projecting + self._hole))

    def _experts(self, experts: list[Linear]) -> int:
        """All tokens' sum in float32; some rows of one expert: gathered, padded, both halves, what comes of them. On a GPU all rows of all
        experts at once, or those of one where it is quantized, at worst all tokens'.
        """
        halves = sum(each.out_features for each in experts if each.name in MLP_IN)
        inner = max(halves, *(each.out_features for each in experts))
        at_once = min(self._tokens, EXPERT_ROWS) if self._storage.on_cpu else self._tokens * experts[0].active
        rows = at_once * (3 * self._hidden + 2 * inner) * self._storage.item
        rows += self._brought_back(experts, at_once)
        shared = 1.5 * (self._layer.mlp_width - halves * experts[0].active) * self._row
        return int(self._tokens * self._hidden * _FLOAT32 + max(rows, shared))

    def _brought_back(self, linears: Iterable[Linear], rows: int) -> int:
        """The worst format's weights on their way back to the compute type, blocked once more by oneDNN or MKL, and the piece
        of the product over so many rows that they make.
        """
        stored = ((each, each.format_in(name)) for each in linears for name in self._storage.formats)
        converted = max((self._converted(each, name, rows) for each, name in stored), default=0)
        return converted + self._storage.packed_by_product

    def _converted(self, linear: Linear, name: FormatName, rows: int) -> int:
        if name == "dense":
            return 0
        weights = _converted_at_once(linear.out_features * linear.in_features, self._storage)
        per_weight: float = 2 * self._storage.item
        if name in FLOAT8:
            weights = min(weights, FLOAT8_AT_A_TIME) if self._storage.on_cpu else weights
            per_weight = FLOAT8_BYTES_PER_WEIGHT
        elif name not in {"int8", "w8a8"}:
            in_float32 = self._storage.item == _FLOAT32
            per_weight = (
                GROUPS_BYTES_PER_WEIGHT_IN_FLOAT32 if in_float32 else GROUPS_BYTES_PER_WEIGHT + self._storage.item
            )
        product = min(linear.out_features, weights // linear.in_features) * rows * self._storage.item
        return int(weights * per_weight) + product
