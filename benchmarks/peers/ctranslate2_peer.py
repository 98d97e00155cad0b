"""CTranslate2 on one processor: a Llama's checkpoint in its own format at 8 bits, written with its own specification."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from benchmarks.peers.checkpoint import config_of, tensors
from benchmarks.peers.served import Engine, Moments, Wish, main


def make(wish: Wish) -> Mapping[str, Engine]:
    """With the sums of 8-bit products, as its documents advise for processors; the rest in the types it supports here."""
    folder = wish.scratch / "ctranslate2"
    if not folder.exists():
        _convert(wish.model, folder)

    class Generator:
        def __init__(self, compute_type: str) -> None:
            self._generator = ctranslate2.Generator(
                str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=wish.threads
            )

        def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:
            moments: list[float] = []

            def heard(_: object) -> bool:
                moments.append(time.perf_counter())
                return False

            started = time.perf_counter()
            self._generator.generate_batch(
                [[f"w{token}" for token in prompt] for prompt in prompts],
                max_length=answer,
                min_length=answer,
                include_prompt_in_result=False,
                callback=heard,
            )
            return Moments(moments[len(prompts) - 1] - started, moments[-1] - started)

    supported = ctranslate2.get_supported_compute_types("cpu")
    return {name: Generator(name) for name in ("int8_float32", "int8_bfloat16") if name in supported}


def _convert(model: Path, folder: Path) -> None:
    """The layout is that of `ctranslate2.converters.transformers.LlamaLoader`, which itself needs torch."""
    config, weights = config_of(model), dict(tensors(model))
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_parameters"]["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
    )
    spec.register_vocabulary([f"w{token}" for token in range(config["vocab_size"])])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "w0", "w1", "w2"
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    decoder.projection.weight = weights["lm_head.weight"]
    for place, layer in enumerate(decoder.layer):
        own = {name.partition(f"layers.{place}.")[2]: value for name, value in weights.items()}
        attention, mlp = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = own["input_layernorm.weight"]
        attention.linear[0].weight = np.concatenate([own[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        attention.linear[1].weight = own["self_attn.o_proj.weight"]
        mlp.layer_norm.gamma = own["post_attention_layernorm.weight"]
        mlp.linear_0.weight = own["mlp.gate_proj.weight"]
        mlp.linear_0_noact.weight = own["mlp.up_proj.weight"]
        mlp.linear_1.weight = own["mlp.down_proj.weight"]
    spec.validate()
    spec.optimize(quantization="int8")
    written = folder.with_suffix(".part")
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    spec.save(str(written))
    written.rename(folder)


if __name__ == "__main__":
    main(make)
