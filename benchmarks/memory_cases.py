"""The slices that `benchmarks.memory` measures: unlike models, formats and loads, those that constants were found on apart.

Sizes are such that most slices hold 150 to 900 MiB: what frameworks add matters less there, as in reality.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS, ComputeType
from strata_planner.contract.plan import (
    PLAN_VERSION,
    DeviceRef,
    MicroBatch,
    Plan,
    Prediction,
    Replica,
    Stage,
    StageMemory,
    StageTimes,
)
from strata_planner.costs.memory import PAGE_TOKENS, embedding_bytes, kv_bytes_per_token, layer_weights_bytes
from strata_planner.costs.shards import sharded
from strata_planner.costs.working import StepShape, Storage, working_memory
from strata_planner.question.model import Model
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.formats.kernels import packed_rows
from strata_runtime.model.padding import pads
from strata_runtime.model.random_model import make_random_model

THREADS = 1  # of each slot
_USABLE_BYTES = 16 << 30


@dataclass(frozen=True)
class Case:
    """One pipeline: `bits` of every layer of each stage, and the load it serves. All sequences are as long as allowed. `ranks`: of each stage."""

    stages: tuple[tuple[int, ...], ...]
    sequences: int
    prompt: int
    answer: int = 12
    compute_type: ComputeType = "bfloat16"
    chunk: int = 2048
    calibration: bool = False
    small: bool = False
    ranks: int = 1

    @property
    def length(self) -> int:
        return self.prompt + self.answer

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(
            prefill=1, decode=-(-self.sequences // len(self.stages)), max_step_tokens=min(self.prompt, self.chunk)
        )


@dataclass(frozen=True)
class Architecture:
    """A random model and the pipelines that are cut from it. `name` tells what is peculiar to it."""

    name: str
    model_type: str
    config: dict[str, Any]
    cases: tuple[Case, ...] = field(default=())

    def make(self, folder: Path) -> Path:
        return make_random_model(folder, self.model_type, dtype=torch.bfloat16, **self.config)


def each(count: int, bits: int) -> tuple[int, ...]:
    return (bits,) * count


ARCHITECTURES = (
    Architecture(
        "llama, grouped queries",
        "llama",
        {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        (
            Case((each(4, 16), each(4, 16)), 8, 500, calibration=True),
            Case((each(4, 8), each(4, 8)), 12, 384, calibration=True),
            Case((each(4, 16), each(4, 16)), 4, 250, compute_type="float32", calibration=True),
            Case(((16, 8, 4), (8, 3), (16, 16, 8)), 12, 512),
            Case((each(4, 4), each(4, 4)), 6, 384, compute_type="float32"),
        ),
    ),
    Architecture(
        "opt, learned positions",
        "opt",
        {
            "vocab_size": 50_272,
            "hidden_size": 1536,
            "ffn_dim": 6144,
            "word_embed_proj_dim": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 24,
            "max_position_embeddings": 2048,
        },
        (
            Case((each(4, 16), each(4, 16), each(4, 16)), 12, 300, calibration=True),
            Case((each(5, 4), each(7, 3)), 12, 700),
        ),
    ),
    Architecture(
        "gpt-neox, fused queries, keys and values",
        "gpt_neox",
        {
            "vocab_size": 50_432,
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 10,
            "num_attention_heads": 20,
            "max_position_embeddings": 2048,
        },
        (Case((each(5, 16), each(5, 16)), 4, 256, compute_type="float32"),),
    ),
    Architecture(
        "gemma, one tied table of 128,000",
        "gemma",
        {
            "vocab_size": 128_000,
            "hidden_size": 1024,
            "intermediate_size": 8192,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 4096,
        },
        (Case((each(4, 16), each(4, 16)), 16, 400),),
    ),
    Architecture(
        "gemma2, soft caps and windows",
        "gemma2",
        {
            "vocab_size": 64_000,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "sliding_window": 512,
            "max_position_embeddings": 4096,
        },
        (Case((each(6, 8), each(6, 4)), 12, 1000),),
    ),
    Architecture(
        "qwen3, long contexts",
        "qwen3",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 16_384,
        },
        (Case((each(4, 16), each(4, 16)), 4, 8000, chunk=1024), Case((each(3, 4), each(5, 4)), 16, 2000, chunk=512)),
    ),
    Architecture(
        "mixtral, eight experts",
        "mixtral",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        (
            Case((each(3, 16), each(3, 16)), 10, 1000, chunk=512),
            Case((each(3, 8), each(3, 4)), 10, 1000, chunk=512),
            Case((each(1, 4) + each(3, 16), each(2, 3)), 4, 500, chunk=256, compute_type="float32"),
        ),
    ),
    Architecture(
        "phi3, fused gates",
        "phi3",
        {
            "vocab_size": 32_064,
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "num_hidden_layers": 15,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        (Case((each(5, 8), each(5, 8), each(5, 8)), 16, 500),),
    ),
    Architecture(
        "llama, small",
        "llama",
        {
            "vocab_size": 16_000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        (Case((each(4, 4), each(4, 4)), 8, 256, small=True),),
    ),
)


def plan_of(case: Case, model: Model, uri: str) -> Plan:
    """The case as a plan, its memory predicted by the functions that every plan's memory is predicted by."""
    stages, first = [], 0
    for place, bits in enumerate(case.stages):
        stages.append(_stage(case, model, place, first, bits))
        first += len(bits)
    return Plan(
        version=PLAN_VERSION,
        model_uri=uri,
        architecture=model.architecture,
        num_layers=model.num_layers,
        compute_type=case.compute_type,
        max_model_len=case.length,
        page_tokens=PAGE_TOKENS,
        replicas=(Replica(replica=0, stages=tuple(stages), micro_batch=case.micro_batch, concurrency=case.sequences),),
        prediction=Prediction(0.0, 0.0, 0.0, 0.0, 0.0, "none", "given"),
    )


def _stage(case: Case, model: Model, place: int, first: int, bits: tuple[int, ...]) -> Stage:
    layers = range(first, first + len(bits))
    formats = tuple(DEFAULT_FORMAT_OF_BITS[each] for each in bits)
    embedding, head = place == 0, place == len(case.stages) - 1
    pages = case.sequences * -(-case.length // PAGE_TOKENS)
    return Stage(
        stage=place,
        slot=f"slot-{place}",
        node=f"n{place}",
        devices=tuple(DeviceRef("cpu", index, _USABLE_BYTES) for index in range(case.ranks)),
        tensor_parallel=case.ranks,
        leader=place == 0,
        layers=(layers[0], layers[-1]),
        bits=bits,
        format=formats,
        kv_bits=16,
        kv_page_budget=pages,
        embedding=embedding,
        head=head,
        memory=_memory(case, model, dict(zip(layers, formats, strict=True)), (embedding, head), pages),
        times=StageTimes(0.0, 0.0, 0.0, 0.0, source="given"),
    )


def _memory(case: Case, model: Model, formats: dict[int, Any], ends: tuple[bool, bool], pages: int) -> StageMemory:
    """Of each device."""
    of = case.compute_type
    shapes = {layer: sharded(model.layers[layer], case.ranks) for layer in formats}
    weights = sum(layer_weights_bytes(shapes[layer], name, of) for layer, name in formats.items())
    tables = -(-embedding_bytes(model, embedding=ends[0], head=ends[1], compute_type=of) // case.ranks)
    kv = pages * PAGE_TOKENS * sum(kv_bytes_per_token(shape, 16, of) for shape in shapes.values())
    step = StepShape(case.micro_batch.max_step_tokens, case.micro_batch.decode, case.length)
    packed = frozenset(packed_rows(COMPUTE_DTYPES[of], THREADS).items())
    pads_rows = pads(COMPUTE_DTYPES[of])
    storage = Storage(frozenset(formats.values()), of, on_cpu=True, packed_rows=packed, pads_rows=pads_rows)
    held = structs.replace(model, layers=tuple(sharded(layer, case.ranks) for layer in model.layers))
    working = working_memory(held, step, storage, head=ends[1]).peak(kv)
    return StageMemory(weights, tables, kv, working, 0, weights + tables + kv + working)
