"""What a step of this runtime takes beside its products: launching layers, attention of each sequence, sampling, scheduling, messages.

Called by `measure`. Layers are narrow, and thin ones so narrow that what does not depend on sizes is most of it; `rates` takes off what reading their weights takes. They
run as a slot runs them, each step after a pause in which caches go to others; the mean of many runs counts, not the best. What a plan's
rates are made of is then what a slot does, not what a loop does that nothing disturbs.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.handling import Load, idle_pipeline
from strata_runtime.measuring.profiling.model import make_shallow
from strata_runtime.measuring.profiling.stage import ProfiledStage, StageSpec, Taken
from strata_runtime.measuring.rates import Overheads

LAYERS, WIDTH, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 6, 384, 1024, 8, 4, 64
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
}
THIN: dict[str, Any] = FIELDS | {
    "hidden_size": 128,
    "intermediate_size": 128,
}  # whose weights are read in a fraction of a launch
_FEW, _MANY = 1, 8  # sequences
_SHORT, _LONG = 64, 448  # keys
_ONE, _PARTS, _WHOLE = (1, 64), (4, 64), (1, 256)  # prompts, and tokens of each
_CHUNK = 56  # tokens: with the sequences beside it rows that nothing is padded to
_ROUNDS, _RUNS, _PAUSE_SECONDS = 3, 30, 0.001
_LEAST_RUNS, _ROUND_SECONDS = 4, 0.5  # a slow device gets fewer runs, so that no figure takes minutes
_MOST_STEP_TOKENS = 512
_ALONE, _TOGETHER = Load(1, 1, 48), Load(16, 1, 48)  # requests that keep two stages handling steps


def take(device: torch.device, compute_type: ComputeType) -> Overheads:
    """Some seconds."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        steps = _steps(device, compute_type, Path(folder))
    return told(steps, _handled(compute_type), compute_type, on_cpu=device.type == "cpu")


class Steps(NamedTuple):
    """Mean runs. Of a thin model: `few` sequences decode, and `several`. Of the narrow one: `one` decodes, `many`, and many with `long` texts, beside
    `carrying` a chunk; a `prompt`, some `prompts`, and the `whole` of their tokens in one. `heads`: seconds after the last layer, of few rows and of
    many. `variation`: of decoding steps alike, their Gini coefficient.
    """

    few: Taken
    several: Taken
    one: Taken
    many: Taken
    long: Taken
    carrying: Taken
    prompt: Taken
    prompts: Taken
    whole: Taken
    heads: tuple[float, float]
    variation: float


class Handled(NamedTuple):
    """Seconds of a step's scheduling and messages, and sequences in it."""

    seconds: float
    sequences: float


def told(steps: Steps, handled: tuple[Handled, Handled], compute_type: ComputeType, *, on_cpu: bool) -> Overheads:
    """What the figures of steps and of handling few and many sequences come to."""
    alone, together = handled
    more, one, many = _MANY - _FEW, steps.one, steps.many
    key = 2 * KV_HEADS * HEAD_DIM * COMPUTE_TYPE_BYTES[compute_type]
    per_key = max(0.0, steps.long.layer - many.layer) / (_MANY * (_LONG - _SHORT))
    sequence = max(0.0, (steps.several.layer - steps.few.layer) / more - _SHORT * per_key)
    beside = [each.before + each.after for each in (one, many)]
    of_each = max(0.0, (together.seconds - alone.seconds) / (together.sequences - alone.sequences))
    # So little is lost in the launches of a GPU: there prompts are as products are.
    prompts = _of_prompts(steps) if on_cpu else _OfPrompts(0.0, 0.0, 0.0)
    return Overheads(
        layer=max(0.0, steps.few.layer - sequence - _SHORT * per_key),
        layer_weights=_weights(THIN),
        sequences=_MANY,
        step=beside[0] + alone.seconds - of_each * alone.sequences,
        sequence_layer=sequence,
        sequence_step=max(0.0, (beside[1] - beside[0]) / more) + of_each,
        sampled_row=max(0.0, (steps.heads[1] - steps.heads[0]) / more),
        attention_bytes_per_second=key / per_key if per_key else float("inf"),
        attention_flops_per_second=1 / prompts.operation if prompts.operation else 0.0,
        row=prompts.row,
        row_weights=_weights(FIELDS),
        row_values=4 * WIDTH + 2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * (WIDTH + INTERMEDIATE),
        chunk=max(0.0, prompts.chunk),
        variation=steps.variation if on_cpu else 0.0,
    )


class _OfPrompts(NamedTuple):
    """Seconds of an operation of attention, of a row without attention, and of a chunk beside sequences that decode, without its rows and attention."""

    operation: float
    row: float
    chunk: float


def _of_prompts(steps: Steps) -> _OfPrompts:
    """Parts and the whole have the same rows; the keys that a row sees are half of its own prompt's."""
    rows, of_a_key = _PARTS[0] * _PARTS[1], 4 * HEADS * HEAD_DIM / 2
    operation = max(0.0, steps.whole.layer - steps.prompts.layer) / (of_a_key * rows * (_WHOLE[1] - _PARTS[1]))
    with_attention = (steps.prompts.layer - steps.prompt.layer) / (rows - _ONE[1])
    row = with_attention - operation * of_a_key * _PARTS[1]
    chunk = steps.carrying.layer - steps.many.layer - _CHUNK * (row + operation * of_a_key * _CHUNK)
    return _OfPrompts(operation, row, chunk)


def _steps(device: torch.device, compute_type: ComputeType, folder: Path) -> Steps:
    dense: tuple[FormatName, ...] = ("dense",)
    cached = _MANY * (_LONG + _MANY + 32)
    layers = StageSpec(dense * LAYERS, compute_type, cached, 1024)
    narrow, thin = (
        make_shallow(fields, LAYERS + 1, folder / name) for fields, name in ((FIELDS, "narrow"), (THIN, "thin"))
    )
    few_and_many = [_decoding(each, _SHORT) for each in (_FEW, _MANY)]
    few, several = (each.mean for each in _typical(ProfiledStage(thin, layers, device), few_and_many))
    inner = ProfiledStage(narrow, layers, device)
    decoding = _typical(inner, [*few_and_many, _decoding(_MANY, _LONG)])
    one, many, long = (each.mean for each in decoding)
    last = ProfiledStage(narrow, StageSpec(dense, compute_type, cached, 1024, head=True, first=LAYERS), device)
    heads = [each.mean.after for each in _typical(last, few_and_many)]
    works = [Work("prefill", *each, 0) for each in (_ONE, _PARTS, _WHOLE)]
    prompt, prompts, whole = (each.mean for each in _typical(inner, works))
    carrying = _typical(inner, [_Carrying("decode", _MANY + 1, 1, _SHORT)])[0].mean
    variation = statistics.median(each.variation for each in decoding)
    return Steps(few, several, one, many, long, carrying, prompt, prompts, whole, (heads[0], heads[1]), variation)


def _weights(fields: dict[str, Any]) -> int:
    """Of a layer's linears."""
    width: int = fields["hidden_size"]
    return 2 * width * (HEADS + KV_HEADS) * HEAD_DIM + 3 * width * int(fields["intermediate_size"])


class _Carrying(Work):
    """Decoding sequences, the last of which is a prompt's chunk instead."""

    @property
    def total_tokens(self) -> int:
        return self.sequences - 1 + _CHUNK

    def segments(self, sample: int = 0) -> list[Segment]:
        *others, last = super().segments(sample)
        return [*others, Segment(last.sequence, 0, _CHUNK, sample)]


def _decoding(sequences: int, keys: int) -> Work:
    return Work("decode", sequences, 1, keys)


class _Round(NamedTuple):
    """Many runs of one step. `variation`: the Gini coefficient of their seconds."""

    mean: Taken
    variation: float


def _typical(stage: ProfiledStage, works: Sequence[Work]) -> list[_Round]:
    """The mean of many runs, for long ones hold up a pipeline; of rounds the middle one, without the first, which makes what is made once."""
    _, *rounds = [[_round(stage, work) for work in works] for _ in range(_ROUNDS + 1)]
    return [sorted(each, key=lambda one: _whole(one.mean))[_ROUNDS // 2] for each in zip(*rounds, strict=True)]


def _whole(taken: Taken) -> float:
    return taken.layer + taken.before + taken.after


def _round(stage: ProfiledStage, work: Work) -> _Round:
    stage.prepare(work)
    taken: list[Taken] = []
    until = time.monotonic() + _ROUND_SECONDS
    while len(taken) < _LEAST_RUNS or (len(taken) < _RUNS and time.monotonic() < until):
        time.sleep(_PAUSE_SECONDS)
        taken.append(stage.run(work))
    mean = Taken(*(statistics.fmean(getattr(each, name) for each in taken) for name in ("layer", "before", "after")))
    return _Round(mean, gini([_whole(each) for each in taken]))


def gini(values: Sequence[float]) -> float:
    """Half the mean difference of two of them, over their mean (Gini, Variabilita e mutabilita, 1912); 0: all are equal."""
    count = len(values)
    ranked = sum((2 * place + 1 - count) * value for place, value in enumerate(sorted(values)))
    return ranked / (count * (count - 1)) / statistics.fmean(values)


def _handled(compute_type: ComputeType) -> tuple[Handled, Handled]:
    """For few and for many; as processors do it, whatever computes."""
    with idle_pipeline(WIDTH, compute_type, _MOST_STEP_TOKENS) as pipeline:
        found = [[pipeline.handle(load) for _ in range(3)] for load in (_ALONE, _TOGETHER)]
    few, many = (min(each, key=lambda handled: handled.seconds) for each in found)
    return Handled(few.seconds, few.sequences), Handled(many.seconds, many.sequences)
