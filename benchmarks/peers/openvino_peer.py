"""OpenVINO on one processor: optimum-intel's export of the checkpoint, run as one stateful request and under GenAI's continuous batching."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

from benchmarks.peers.served import Engine, Moments, Wish, main, timed_steps

CACHE_GIBIBYTES = 1
MOST_STEP_TOKENS = 4096  # the prompts of a cell go in at once


def make(wish: Wish) -> Mapping[str, Engine]:
    """Weights as `optimum-cli export openvino --weight-format` makes them; one request that has all threads."""
    folder = wish.scratch / f"openvino-{wish.bits}"
    if not folder.exists():
        _convert(wish, folder)
    properties = {
        "INFERENCE_NUM_THREADS": wish.threads,
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # the process is bound already
    }
    precisions = ("bf16",) if wish.bits == 16 else ("bf16", "f32")
    engines: dict[str, Engine] = {}
    for precision in precisions:
        chosen = {**properties, "INFERENCE_PRECISION_HINT": precision}
        engines[f"stateful {precision}"] = _stateful(folder, chosen)
        engines[f"continuous {precision}"] = _continuous(folder, chosen)
    return engines


def _stateful(folder: Path, properties: Mapping[str, Any]) -> Engine:
    compiled = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", dict(properties))

    class Stateful:
        def __init__(self) -> None:
            self._request = compiled.create_infer_request()

        def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
            self._request.reset_state()
            tokens, length = np.array(prompts, np.int64), 0
            rows = np.arange(len(prompts), dtype=np.int32)

            def step() -> None:
                nonlocal tokens, length
                places = np.arange(length, length + tokens.shape[1], dtype=np.int64)
                length += tokens.shape[1]
                inputs = {
                    "input_ids": tokens,
                    "attention_mask": np.ones((len(prompts), length), np.int64),
                    "position_ids": np.tile(places, (len(prompts), 1)),
                    "beam_idx": rows,
                }
                self._request.infer(inputs, share_inputs=True)
                tokens = self._request.get_tensor("logits").data[:, -1:].argmax(-1)

            return timed_steps(step, step, answer)

    return Stateful()


def _continuous(folder: Path, properties: Mapping[str, Any]) -> Engine:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIBIBYTES
    scheduler.max_num_batched_tokens = MOST_STEP_TOKENS
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", dict(properties))

    class Continuous:
        def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
            wanted = genai.GenerationConfig(max_new_tokens=answer, min_new_tokens=answer, ignore_eos=True)
            started = time.perf_counter()
            handles = [  # a request whose handle is gone is dropped
                pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), wanted)
                for number, prompt in enumerate(prompts)
            ]
            pipeline.step()
            begun = time.perf_counter()
            while pipeline.has_non_finished_requests():
                pipeline.step()
            ended = time.perf_counter()
            lengths = {len(output.generated_ids) for handle in handles for output in handle.read_all()}
            if lengths != {answer}:
                raise RuntimeError(f"continuous batching made answers of {lengths} tokens instead of {answer}")
            return Moments(begun - started, ended - started)

    return Continuous()


def _convert(wish: Wish, folder: Path) -> None:
    quantization = {
        16: None,
        8: OVWeightQuantizationConfig(bits=8),
        4: OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
    }[wish.bits]
    how: dict[str, Any] = {"quantization_config": quantization} if quantization else {"load_in_8bit": False}
    model = OVModelForCausalLM.from_pretrained(wish.model, export=True, compile=False, **how)
    written = folder.with_suffix(".part")
    shutil.rmtree(written, ignore_errors=True)
    model.save_pretrained(written)
    written.rename(folder)


if __name__ == "__main__":
    main(make)
