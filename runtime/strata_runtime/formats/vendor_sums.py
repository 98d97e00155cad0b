"""How the vendor's library adds up on a GPU. Called by whoever loads or measures there."""

import torch


def add_in_float32(device: torch.device) -> None:
    """Products of 16 bits keep float32 sums all the way, as those of every kernel of ours do. Left alone, cuBLAS may share a long sum out and round its parts to 16 bits
    before it adds them; results on an H200 were further off than float32 sums can be. Of the whole process; nothing on a processor.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
