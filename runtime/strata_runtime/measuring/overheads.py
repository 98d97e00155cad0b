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
    on_cpu = device.type == "cpu"
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = make_shallow(FIELDS, LAYERS + 1, Path(folder) / "narrow")
        cached = _MANY * (_LONG + _MANY + 32)
        dense: FormatName = "dense"
        inner = ProfiledStage(model, StageSpec((dense,) * LAYERS, compute_type, cached, 1024), device)
        last = ProfiledStage(model, StageSpec((dense,), compute_type, cached, 1024, head=True, first=LAYERS), device)
        thin = ProfiledStage(
            make_shallow(THIN, LAYERS + 1, Path(folder) / "thin"),
            StageSpec((dense,) * LAYERS, compute_type, cached, 1024),
            device,
        )
        few, several = (each.mean for each in _typical(thin, [_decoding(each, _SHORT) for each in (_FEW, _MANY)]))
        decoding = _typical(inner, [_decoding(*each) for each in ((_FEW, _SHORT), (_MANY, _SHORT), (_MANY, _LONG))])
        one, many, long = (each.mean for each in decoding)
        head = [each.mean.after for each in _typical(last, [_decoding(each, _SHORT) for each in (_FEW, _MANY)])]
        works = [Work("prefill", *each, 0) for each in (_ONE, _PARTS, _WHOLE)]
        prompt, prompts, whole = (each.mean for each in _typical(inner, works))
        carrying = _typical(inner, [_Carrying("decode", _MANY + 1, 1, _SHORT)])[0].mean
    alone, together = _handled(compute_type)
    key = 2 * KV_HEADS * HEAD_DIM * COMPUTE_TYPE_BYTES[compute_type]
    per_key = max(0.0, long.layer - many.layer) / (_MANY * (_LONG - _SHORT))
    more = _MANY - _FEW
    sequence = max(0.0, (several.layer - few.layer) / more - _SHORT * per_key)
    beside = [each.before + each.after for each in (one, many)]
    # Parts and the whole have the same rows; the keys that a row sees are half of its own prompt's.
    rows, of_a_key = _PARTS[0] * _PARTS[1], 4 * HEADS * HEAD_DIM / 2
    attention = max(0.0, whole.layer - prompts.layer) / (of_a_key * rows * (_WHOLE[1] - _PARTS[1]))
    with_attention = (prompts.layer - prompt.layer) / (rows - _ONE[1])
    row = with_attention - attention * of_a_key * _PARTS[1]
    chunk = carrying.layer - many.layer - _CHUNK * (row + attention * of_a_key * _CHUNK)
    of_each = max(0.0, (together[0] - alone[0]) / (together[1] - alone[1]))
    return Overheads(
        layer=max(0.0, few.layer - sequence - _SHORT * per_key),
        layer_weights=_weights(THIN),
        sequences=_MANY,
        step=beside[0] + alone[0] - of_each * alone[1],
        sequence_layer=sequence,
        sequence_step=max(0.0, (beside[1] - beside[0]) / more) + of_each,
        sampled_row=max(0.0, (head[1] - head[0]) / more),
        attention_bytes_per_second=key / per_key if per_key else float("inf"),
        # So little is lost in the launches of a GPU: there prompts are as products are.
        attention_flops_per_second=1 / attention if attention and on_cpu else 0.0,
        row=row if on_cpu else 0.0,
        row_weights=_weights(FIELDS),
        row_values=4 * WIDTH + 2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * (WIDTH + INTERMEDIATE),
        chunk=max(0.0, chunk) if on_cpu else 0.0,
        variation=statistics.median(each.variation for each in decoding) if on_cpu else 0.0,
    )


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


def _handled(compute_type: ComputeType) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of a step's scheduling and messages, and sequences in it, for few and for many; as processors do it, whatever computes."""
    with idle_pipeline(WIDTH, compute_type, _MOST_STEP_TOKENS) as pipeline:
        found = [[pipeline.handle(load) for _ in range(3)] for load in (_ALONE, _TOGETHER)]
    few, many = (min(each, key=lambda handled: handled.seconds) for each in found)
    return (few.seconds, few.sequences), (many.seconds, many.sequences)
