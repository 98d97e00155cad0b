"""Plans made by hand for tests of the runtime: an even split of a checkpoint's layers over slots."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT, DEFAULT_FORMAT_OF_BITS, ComputeType, FormatName
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
from strata_planner.question.model import Model

PAGE_TOKENS = 16
_MEMORY = StageMemory(
    weights_bytes=0, embedding_bytes=0, kv_bytes=0, temporary_bytes=0, overhead_bytes=0, total_bytes=0
)
_TIMES = StageTimes(
    prefill_seconds=0, decode_seconds=0, prefill_transfer_seconds=0, decode_transfer_seconds=0, source="none"
)
_PREDICTION = Prediction(
    tokens_per_second=1,
    ttft_ms=0,
    tpot_ms=0,
    latency_seconds=0,
    quality_penalty=0,
    sensitivity_source="none",
    bound_by="nothing",
)


def even_plan(
    model: Path,
    slots: Sequence[str],
    *,
    compute_type: ComputeType = "float32",
    bits: int = 16,
    pages: int = 32,
    micro_batch: tuple[int, int, int] = (4, 4, 64),
    max_model_len: int = 128,
    formats: Sequence[FormatName] | None = None,
    kv_bits: int = 16,
    ranks: int = 1,
) -> Plan:
    """Layers shared out evenly over `slots`, one stage each, of so many ranks; `formats` per layer overrides `bits`."""
    read = Model.from_folder(model)
    layers = read.num_layers
    chosen = list(formats or [DEFAULT_FORMAT_OF_BITS[bits]] * layers)
    cuts = [layers * place // len(slots) for place in range(len(slots) + 1)]
    stages = tuple(
        _stage(place, slots, chosen[cuts[place] : cuts[place + 1]], cuts[place], pages) for place in range(len(slots))
    )
    devices = tuple(DeviceRef(type="cpu", index=index, usable_bytes=1 << 30) for index in range(ranks))
    stages = tuple(structs.replace(stage, kv_bits=kv_bits, devices=devices, tensor_parallel=ranks) for stage in stages)
    return Plan(
        version=PLAN_VERSION,
        model_uri=str(model),
        architecture=read.architecture,
        num_layers=layers,
        compute_type=compute_type,
        max_model_len=max_model_len,
        page_tokens=PAGE_TOKENS,
        replicas=(Replica(0, stages, MicroBatch(*micro_batch), concurrency=4),),
        prediction=_PREDICTION,
        prefix_caching=not read.keeps_state,
    )


def _stage(place: int, slots: Sequence[str], formats: Sequence[FormatName], first: int, pages: int) -> Stage:
    return Stage(
        stage=place,
        slot=slots[place],
        node=slots[place],
        devices=(DeviceRef(type="cpu", index=0, usable_bytes=1 << 30),),
        tensor_parallel=1,
        leader=place == 0,
        layers=(first, first + len(formats) - 1),
        bits=tuple(BITS_OF_FORMAT[name] for name in formats),
        format=tuple(formats),
        kv_bits=16,
        kv_page_budget=pages,
        embedding=place == 0,
        head=place == len(slots) - 1,
        memory=_MEMORY,
        times=_TIMES,
    )
