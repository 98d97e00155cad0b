"""Write a trained model as a Hugging Face folder, with the held-out sample beside it.

Called by ``train``. The model card is written by hand: it quotes measurements, which ``perplexity`` takes on the finished folder.
"""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.corpus import Corpus

SHARD_SIZE = "12MB"  # two shards: loading a slice must then choose among files, as it does for large models
HELDOUT_DOCUMENT_CHARACTERS = 12_000
HELDOUT_SEPARATOR = "\n\f\n"  # between documents of heldout.txt


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, folder: Path) -> None:
    """Weights in bfloat16, tokenizer, generation defaults (greedy) and ``heldout.txt``, the first part of every held-out document."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16).cpu()
    model.set_attn_implementation("sdpa")
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    sample = HELDOUT_SEPARATOR.join(text[:HELDOUT_DOCUMENT_CHARACTERS] for text in corpus.heldout)
    (folder / "heldout.txt").write_text(sample, encoding="utf-8")
