"""EAGLE-3 heads with random weights in the published layout, and what such a head drafts, computed plainly: everything anew, without a pool."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

DRAFT_VOCABULARY = 48


def head_config(target: Path, **changes: Any) -> dict[str, Any]:
    """Of a head for the model that lies there."""
    config = json.loads((target / "config.json").read_text())
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | changes


def head_tensors(config: dict[str, Any], *, seed: int = 0, layer: str = "midlayer.") -> dict[str, Tensor]:
    """In float32, drawn so that every tensor matters; with an embedding where that of the model has another width."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    fused = 3 * config.get("target_hidden_size", hidden)
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    vocabulary, drafted = config["vocab_size"], config["draft_vocab_size"]
    targets = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
    own = {"embed_tokens.weight": matrix(vocabulary, hidden)} if fused != 3 * hidden else {}
    return own | {
        "fc.weight": matrix(hidden, fused),
        f"{layer}self_attn.q_proj.weight": matrix(queries, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": matrix(keys, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": matrix(hidden, queries),
        f"{layer}mlp.gate_proj.weight": matrix(width, hidden),
        f"{layer}mlp.up_proj.weight": matrix(width, hidden),
        f"{layer}mlp.down_proj.weight": matrix(hidden, width),
        f"{layer}input_layernorm.weight": norm(),
        f"{layer}hidden_norm.weight": norm(),
        f"{layer}post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(drafted, hidden),
        "d2t": targets - torch.arange(drafted),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, targets, value=True),
    }


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_head(folder: Path, target: Path, *, seed: int = 0, **changes: Any) -> Path:
    config = head_config(target, **changes)
    return write_head(folder, config, head_tensors(config, seed=seed))


class PlainHead:
    """A head of `midlayer`s and its model, both in float32, over whole texts."""

    def __init__(self, target: Path, folder: Path, fused: Sequence[int]) -> None:
        """`fused`: layers of the model, whose inputs are fused."""
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._at = {name: each.float() if each.is_floating_point() else each for name, each in stored.items()}
        self._fused = fused

    @torch.no_grad()
    def chain(self, text: Sequence[int], count: int) -> list[int]:
        """The tokens most likely behind a text, one after the other. Position i has the state there and the token behind it."""
        known = torch.tensor(text)
        states = self._model(known[None, :-1], output_hidden_states=True).hidden_states
        inputs = torch.cat([states[layer][0] for layer in self._fused], dim=-1) @ self._at["fc.weight"].T
        embedding = self._at.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        drafted: list[int] = []
        for _ in range(count):
            tokens = torch.cat([known[1:], torch.tensor(drafted, dtype=known.dtype)])
            outputs = self._layer(embedding[tokens], inputs)
            logits = self._norm(outputs[-1], "norm") @ self._at["lm_head.weight"].T
            chosen = int(logits.argmax())
            drafted.append(chosen + int(self._at["d2t"][chosen]))
            inputs = torch.cat([inputs, outputs[-1:]])
        return drafted

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        normed = self._norm(states, "midlayer.hidden_norm")
        both = torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        query, key = (self._turned(self._by_head(both, name)) for name in ("q", "k"))
        key, value = (each.repeat_interleave(heads // kv_heads, 0) for each in (key, self._by_head(both, "v")))
        attended = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        projected = attended.transpose(0, 1).flatten(1) @ self._at["midlayer.self_attn.o_proj.weight"].T
        hidden = (normed if self._config.get("norm_before_residual") else states) + projected
        rows = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (rows @ self._at[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (functional.silu(gate) * up) @ self._at["midlayer.mlp.down_proj.weight"].T

    def _by_head(self, rows: Tensor, name: str) -> Tensor:
        projected = rows @ self._at[f"midlayer.self_attn.{name}_proj.weight"].T
        width = self._config.get("head_dim") or self._config["hidden_size"] // self._config["num_attention_heads"]
        return projected.view(len(rows), -1, width).transpose(0, 1)

    def _turned(self, heads: Tensor) -> Tensor:
        """RoFormer, arXiv 2104.09864: both halves of a head are one plane."""
        width, positions = heads.shape[-1], torch.arange(heads.shape[1]).float()
        angles = positions[:, None] * self._config["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], self._at[f"{name}.weight"], self._config["rms_norm_eps"])
