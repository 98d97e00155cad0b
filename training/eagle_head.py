"""An EAGLE-3 head as it is trained: the parameters of the published layout, and its unrolled training-time test. Called by `eagle`.

Knows nothing of the project's runtime, whose drafts a test compares with it. Source: EAGLE-3 (arXiv 2503.01840), sections 3.1 and 3.2.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


def fused_inputs(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are fused, of a model of so many."""
    return 2, layers // 2, layers - 3


class HeadAttention(nn.Module):
    """Queries, keys and values of [embedding, state]: twice the hidden size."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._width = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def entries(self, both: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """both: [batch, chains, 2 * hidden] -> queries, keys, values [batch, heads, chains, width] each, positions applied."""
        query, key, value = (
            each(both).unflatten(-1, (-1, self._width)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        return query, key.repeat_interleave(self._groups, 1), value.repeat_interleave(self._groups, 1)

    def attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Chain i sees the text's entries 0..i, the first of `keys`, and what it has drafted itself since, its own entry of each of the others."""
        chains = query.shape[2]
        unseen = torch.ones(chains, chains, dtype=torch.bool, device=query.device).triu_(1)
        scores = (query @ keys[0].mT).masked_fill(unseen, float("-inf"))
        own = [(query * each).sum(-1, keepdim=True) for each in keys[1:]]
        weights = (torch.cat([scores, *own], dim=-1).float() * self._width**-0.5).softmax(-1).to(query.dtype)
        out = weights[..., :chains] @ values[0]
        for place, each in enumerate(values[1:], start=chains):
            out = out + weights[..., place : place + 1] * each
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class HeadLayer(nn.Module):
    """A Llama layer that reads embeddings beside states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleHead(nn.Module):
    """`targets`: int64 [draft vocabulary], the tokens that it drafts, ascending. Its state_dict is the published layout, without the table."""

    def __init__(self, config: LlamaConfig, targets: Tensor) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(targets), bias=False)
        self.targets = targets
        self._rotary = [LlamaRotaryEmbedding(config)]  # listed: it is no part of what is stored

    @torch.no_grad()
    def start_from(self, model: LlamaForCausalLM) -> None:
        """Near the model: its head's rows, last norm and last layer, over what enters the highest layer that is fused."""
        hidden = self.norm.weight.shape[0]
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * hidden :].fill_diagonal_(1)
        self.norm.load_state_dict(model.model.norm.state_dict())
        self.lm_head.weight.copy_(model.lm_head.weight[self.targets])
        last = model.model.layers[-1]
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        self.midlayer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        for name in ("q_proj", "k_proj", "v_proj"):
            own, from_ = getattr(self.midlayer.self_attn, name), getattr(last.self_attn, name)
            own.weight[:, hidden:].copy_(from_.weight)
        self.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        self.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())

    def unroll(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """The training-time test: of each chain the logits of `steps` drafts, one behind the other, given the text's own tokens.

        embedded: [batch, tokens, hidden], of the text's tokens; states: [batch, tokens, 3 * hidden], what enters the fused layers there. Chain i begins
        with the state at i and the token at i + 1; its draft number j is compared with what the model says behind token i + 1 + j. Returns logits
        [batch, tokens - steps, draft vocabulary] of each.
        """
        chains, layer = embedded.shape[1] - steps, self.midlayer
        state: Tensor = self.fc(states[:, :chains])
        places = torch.arange(chains, device=embedded.device)[None]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(steps):
            tokens = layer.input_layernorm(embedded[:, 1 + step : 1 + step + chains])
            both = torch.cat([tokens, layer.hidden_norm(state)], dim=-1)
            query, key, value = layer.self_attn.entries(both, self._rotary[0](both, places + step))
            keys.append(key)
            values.append(value)
            state = state + layer.self_attn.attend(query, keys, values)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            found.append(self.lm_head(self.norm(state)))
        return found


def loss_of(logits: list[Tensor], said: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with the model's own distribution over what the head can draft, later drafts at 0.8 of those before; what it cannot draft is left out.

    said: [batch, tokens, vocabulary], of the model at the same tokens as `EagleHead.unroll` was given.
    """
    total = said.new_zeros((), dtype=torch.float32)
    can, wanted = torch.isin(said.argmax(-1), targets), said.index_select(-1, targets).float().softmax(-1)
    for step, drafted in enumerate(logits):
        behind = slice(1 + step, 1 + step + drafted.shape[1])
        each = -(wanted[:, behind] * drafted.float().log_softmax(-1)).sum(-1)
        total = total + 0.8**step * each[can[:, behind]].mean()
    return total


@torch.no_grad()
def agreement(logits: list[Tensor], said: Tensor, targets: Tensor) -> list[float]:
    """The share of chains whose first 1, 2, ... drafts are all what the model says, where the text says so too."""
    right = torch.ones(logits[0].shape[:2], dtype=torch.bool, device=said.device)
    shares = []
    for step, drafted in enumerate(logits):
        wanted = said[:, 1 + step : 1 + step + drafted.shape[1]].argmax(-1)
        right &= targets[drafted.argmax(-1)] == wanted
        shares.append(right.float().mean().item())
    return shares
