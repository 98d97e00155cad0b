"""Layers that are no attention, over the states of the step's batch: short convolutions and Gated DeltaNet (arXiv 2412.06464).

Used by `attention_interface`. transformers' own forwards take a packed batch for one sequence, so that each would see
the one before it; here every sequence goes on from its own state. Their chunked rule is used as it is.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from strata_runtime.model.kv.states import LayerState, StateRun

_CHUNK = 64  # tokens that the rule multiplies with each other


def own_mixer(module: Any) -> Callable[..., Any] | None:
    """The forward to be used in place of the module's; None: it keeps no state."""
    forward = _FORWARDS.get(type(module).__name__)
    return None if forward is None else partial(forward, module)


def keeps_state(module: Any) -> bool:
    return type(module).__name__ in _FORWARDS


def _short_convolution(module: Any, hidden_states: Tensor, **_given: Any) -> Tensor:
    """The forward of Lfm2ShortConv. hidden_states: [1, rows, hidden]."""
    before, after, inputs = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
    gated = before * inputs
    state, runs = _state_of(module)
    convolved = torch.zeros_like(gated)  # rows of padding stay so
    for run in runs:
        convolved[run.rows] = _convolve(module.conv, state, run, run.of(gated)).to(gated.dtype).flatten(0, 1)
    out: Tensor = module.out_proj((after * convolved)[None])
    return out


def _gated_delta_net(module: Any, hidden_states: Tensor, **_given: Any) -> Tensor:
    """The forward of Qwen3NextGatedDeltaNet."""
    mixed, beside = module.in_proj_qkvz(hidden_states), functional.linear(hidden_states, module.in_proj_ba.weight)
    query, key, value, z, b, a = module.fix_query_key_value_ordering(mixed, beside)
    channels = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
    return _delta_rule(module, channels[0], z[0], b[0], a[0])


def _split_gated_delta_net(module: Any, hidden_states: Tensor, **_given: Any) -> Tensor:
    """The forward of Qwen3_5GatedDeltaNet, whose projections are apart."""
    z = module.in_proj_z(hidden_states)[0].unflatten(-1, (-1, module.head_v_dim))
    b, a = (functional.linear(hidden_states[0], each.weight) for each in (module.in_proj_b, module.in_proj_a))
    return _delta_rule(module, module.in_proj_qkv(hidden_states)[0], z, b, a)


def _delta_rule(module: Any, channels: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """channels: [rows, queries, keys and values]; z: [rows, heads, value_dim]; b, a: [rows, heads] -> [1, rows, hidden]."""
    learned = b.sigmoid()
    decay = -module.A_log.float().exp() * functional.softplus(a.float() + module.dt_bias)
    state, runs = _state_of(module)
    attended = torch.zeros_like(z)  # rows of padding stay so
    activation, rule = ACT2FN[module.activation], _chunked_rule(module)
    for run in runs:
        convolved = activation(_convolve(module.conv1d, state, run, run.of(channels))).to(channels.dtype)
        heads = _heads(module, convolved)
        update = _step if run.length == 1 else partial(_chunks, rule)
        attended[run.rows] = update(state, run, heads, run.of(decay), run.of(learned)).to(z.dtype).flatten(0, 1)
    normed = module.norm(attended.flatten(0, 1), z.flatten(0, 1)).view(z.shape)
    out: Tensor = module.out_proj(normed.flatten(1)[None])
    return out


_FORWARDS: dict[str, Callable[..., Any]] = {
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm2ShortConv": _short_convolution,
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _split_gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _split_gated_delta_net,
}

Heads = tuple[Tensor, Tensor, Tensor]


def _state_of(module: Any) -> tuple[LayerState, tuple[StateRun, ...]]:
    module.strata_step.begun.value += 1
    batch = module.strata_step.batch
    return batch.states[module.layer_idx], batch.state_runs


def _convolve(convolution: Any, state: LayerState, run: StateRun, inputs: Tensor) -> Tensor:
    """inputs: [count, length, channels] -> the same in float32, each channel over its last inputs, which the state keeps."""
    window = torch.cat((state.inputs[run.slots], inputs), dim=1)
    kept = state.inputs.shape[1]
    state.inputs[run.slots] = window[:, window.shape[1] - kept :]
    # One for each place of the window, the newest last.
    taps: Sequence[Tensor] = convolution.weight[:, 0].float().unbind(1)
    out: Tensor = window[:, : run.length].float() * taps[0]
    for place, tap in enumerate(taps[1:], start=1):
        out.addcmul_(window[:, place : place + run.length].float(), tap)
    return out if convolution.bias is None else out.add_(convolution.bias.float())


def _heads(module: Any, convolved: Tensor) -> Heads:
    """[count, length, channels] -> queries and keys [count, length, key heads, key_dim], values [count, length, heads, value_dim]."""
    query, key, value = torch.split(convolved, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    shape = (*convolved.shape[:2], -1)
    query, key = (each.reshape(*shape, module.head_k_dim) for each in (query, key))
    return query, key, value.reshape(*shape, module.head_v_dim)


def _chunked_rule(module: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers', of the module's own file."""
    rule: Callable[..., tuple[Tensor, Tensor]] = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
    return rule


def _chunks(
    rule: Callable[..., tuple[Tensor, Tensor]],
    state: LayerState,
    run: StateRun,
    heads: Heads,
    decay: Tensor,
    learned: Tensor,
) -> Tensor:
    """The rule over a run of several tokens: [count, length, heads, value_dim]."""
    out, state.matrices[run.slots] = rule(
        *heads,
        g=decay,
        beta=learned,
        chunk_size=min(_CHUNK, 1 << (run.length - 1).bit_length()),
        initial_state=state.matrices[run.slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out


def _step(state: LayerState, run: StateRun, heads: Heads, decay: Tensor, learned: Tensor) -> Tensor:
    """The rule over one token of each sequence. A processor goes through one state after the other, which its cache holds; a GPU through all."""
    query, key, value = (each[:, 0].float() for each in heads)
    groups = value.shape[1] // key.shape[1]
    query, key = (_unit(each).repeat_interleave(groups, dim=1) for each in (query, key))
    given = (query * query.shape[-1] ** -0.5, key, value, decay[:, 0].exp(), learned[:, 0].float())
    move = _move_together if state.matrices.is_cuda else _move_in_turn
    return move(state.matrices, run.slots, given)[:, None]


def _move_together(states: Tensor, slots: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    """given: as `_moved` takes them, of each sequence [count, ...]."""
    gathered = states[slots]
    out = _moved(gathered.flatten(0, 1), *(each.flatten(0, 1) for each in given))
    states[slots] = gathered
    return out.view(len(slots), -1, out.shape[-1])


def _move_in_turn(states: Tensor, slots: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    """The same."""
    return torch.stack([_moved(states[slot], *each) for slot, *each in zip(slots.tolist(), *given, strict=True)])


def _moved(matrices: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, learned: Tensor) -> Tensor:
    """Each state decays, and what it says of the key moves towards the value, in place.

    matrices: [heads, key_dim, value_dim]; decay, learned: [heads]. Returns what it says of the query [heads, value_dim].
    """
    key = key[:, None]
    matrices.mul_(decay[:, None, None])
    wrong = (value[:, None] - torch.bmm(key, matrices)).mul_(learned[:, None, None])
    matrices.baddbmm_(key.mT, wrong)
    return torch.bmm(query[:, None], matrices)[:, 0]


def _unit(vectors: Tensor) -> Tensor:
    unit: Tensor = vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)
    return unit
