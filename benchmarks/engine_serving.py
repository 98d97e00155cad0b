"""What stands around the engine under `strata up`: what HTTP costs beside the slot's own port. Called by `benchmarks.engine`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.deployment import NAME, Deployment, Wishes, deployed
from benchmarks.engine_rows import gateway_row
from benchmarks.load import streams as load
from benchmarks.pipeline import SHAPES
from benchmarks.rows import Row
from benchmarks.slots import ServedPipeline, slot_processes
from benchmarks.truth import write_tokenizer
from strata_planner.contract.plan import Plan
from strata_runtime.wire.client import PipelineClient

PROMPT, ANSWER = 64, 64
LONGEST = 256
DEVICE_BYTES = 2_000_000_000
_VOCABULARY = 1000


def measure_serving(model: Path, folder: Path, rounds: int, streams: Sequence[int]) -> list[Row]:
    """The same plan twice: under `strata up`, asked over HTTP, and in a slot of its own, asked at its port. Neither is bound to a processor."""
    write_tokenizer(model, SHAPES["vocab_size"])
    wishes = Wishes(
        model,
        max_model_len=LONGEST,
        prompt_tokens=PROMPT,
        output_tokens=ANSWER,
        concurrency=max(streams),
        compute_type="bfloat16",
        device_bytes=DEVICE_BYTES,
        stages=1,
    )
    with deployed(folder, wishes) as deployment, slot_processes(deployment.record.plan, bound=False) as slots:
        plan = deployment.record.plan
        client = PipelineClient(slots)
        pipeline = ServedPipeline(client, client.serve(plan))
        return [_gateway(deployment, pipeline, count, rounds) for count in streams]


def _gateway(deployment: Deployment, pipeline: ServedPipeline, streams: int, rounds: int) -> Row:
    over_http = partial(http_rate, deployment.port, streams)

    def own() -> float:
        return pipeline.measure(streams, PROMPT, ANSWER).tokens_per_second

    pairs = [(over_http(turn), own()) for turn in range(rounds + 1)][1:]
    return gateway_row(streams, [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def http_rate(port: int, streams: int, turn: int) -> float:
    """Tokens a second of so many streams that begin at once. Raises RuntimeError if one fails."""
    bodies = [
        {
            "model": NAME,
            "prompt": [(7 * number + place) % _VOCABULARY for place in range(PROMPT)],
            "max_tokens": ANSWER,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": f"{turn}-{number}",  # nothing of another prompt is found
        }
        for number in range(streams)
    ]
    seen = load.once(port, bodies)
    if seen.failed or seen.ended != streams:
        raise RuntimeError(f"{seen.ended} of {streams} streams ended; {'; '.join(seen.failed[:3])}")
    return streams * ANSWER / seen.seconds


def held_bytes(plan: Plan) -> int:
    """Weights and KV of a plan of one stage."""
    (stage,) = plan.replicas[0].stages
    memory = stage.memory
    return memory.weights_bytes + memory.embedding_bytes + memory.kv_bytes
