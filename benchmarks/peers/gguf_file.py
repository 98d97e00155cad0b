"""A Llama's checkpoint as a GGUF file of bfloat16 weights, with the vocabulary of its tokenizer.json if it has one. Used where `gguf` is installed:

by `llama_cpp_peer`, and for llama-server as `python -m benchmarks.peers.gguf_file MODEL FILE`.
"""

import json
import sys
from pathlib import Path

import gguf

from benchmarks.peers.checkpoint import Array, config_of, tensors

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(weight: Array, heads: int) -> Array:
    """Rows of queries or keys as llama.cpp rotates them: the two of a pair beside each other, not half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: Path, file: Path) -> None:
    config = config_of(model)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, model)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kind = gguf.GGMLQuantizationType.BF16
    for name, value in tensors(model):
        rotated = next((count for part, count in heads.items() if part in name), None)
        weight = value if rotated is None else interleaved(value, rotated)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, model: Path) -> None:
    """Tokens and merges of byte-level BPE; a tokenizer of whole words becomes one that merges nothing. Prompts are sent as token ids."""
    file = model / "tokenizer.json"
    if not file.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    told = json.loads(file.read_text(encoding="utf-8"))
    words, special = told["model"]["vocab"], {each["content"] for each in told["added_tokens"]}
    words |= {each["content"]: each["id"] for each in told["added_tokens"]}
    tokens = sorted(words, key=words.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in told["model"].get("merges", [])] or ["w 0"])  # none is refused
    config = config_of(model)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
