"""llama.cpp on one processor through its C interface: bfloat16, Q8_0 or Q4_0, a batch with a sequence id for each prompt, as `llama-batched-bench` does.

Tokens are not sampled, as in its own benchmarks: any token goes in next. No weight is locked in memory.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.served import Engine, Moments, Wish, main, timed_steps

SEQUENCES, CONTEXT = 16, 1024  # of a cell at most, and tokens of one sequence
BATCH, MICRO_BATCH = 2048, 512
FLASH_ATTENTION = {
    "flash attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "no flash attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
FILE_TYPES = {8: llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, 4: llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


class Context:
    """A model with a cache of its own."""

    def __init__(self, model: Any, threads: int, flash: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = SEQUENCES * CONTEXT
        params.n_seq_max = SEQUENCES
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        length = len(prompts[0])

        def first() -> None:
            rows = [
                (sequence, place, token) for sequence, each in enumerate(prompts) for place, token in enumerate(each)
            ]
            self._decode(rows, [(sequence + 1) * length - 1 for sequence in range(len(prompts))])

        def step() -> None:
            nonlocal length
            self._decode([(sequence, length, length) for sequence in range(len(prompts))], range(len(prompts)))
            length += 1

        return timed_steps(first, step, answer)

    def _decode(self, rows: Sequence[tuple[int, int, int]], with_logits: Sequence[int]) -> None:
        """rows: sequence, position and token of each."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, place, token) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, place, 0
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        for row in with_logits:
            batch.logits[row] = 1
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens ended with {code} instead of 0")
        llama_cpp.llama_synchronize(self._context)


def make(wish: Wish) -> Mapping[str, Engine]:
    """With flash attention and without."""
    llama_cpp.llama_backend_init()
    file = _file(wish)
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file}")
    return {name: Context(model, wish.threads, flash) for name, flash in FLASH_ATTENTION.items()}


def _file(wish: Wish) -> Path:
    """The checkpoint as GGUF; of 8 and 4 bits as `llama-quantize` makes it."""
    plain, file = (wish.scratch / f"llama-{bits}.gguf" for bits in (16, wish.bits))
    if not plain.exists():
        part = plain.with_suffix(".part")
        write_gguf(wish.model, part)
        part.rename(plain)
    if not file.exists():
        part = file.with_suffix(".part")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[wish.bits], wish.threads
        code = llama_cpp.llama_model_quantize(str(plain).encode(), str(part).encode(), ctypes.byref(params))
        if code:
            raise RuntimeError(f"llama_model_quantize of {plain} ended with {code} instead of 0")
        part.rename(file)
    return file


if __name__ == "__main__":
    main(make)
