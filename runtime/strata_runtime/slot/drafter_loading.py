"""Loading what drafts beside the leader's own layers, at 16 bits: a small model, whole, or a head that reads the layers' states. Called by the slot's prepare."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from msgspec import structs

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.plan import NO_SPECULATION
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.loading.draft_head import HeadFolder
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.quantized import read_model_config
from strata_runtime.loading.same_tokens import check_same_tokens
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.eagle_head import LAYER
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.drafter import Drafter, SmallModel
from strata_runtime.slot.head_guesser import HeadGuesser
from strata_runtime.slot.role_cache import cache_of


def check_draft_model(role: Role, target: Path, progress: Callable[[], None]) -> None:
    """Before anything is loaded for it. `target`: the folder of the model that verifies.

    Raises InputError for a model of other tokens, for what is no model or no head, and for a head that reads other layers than the plan says.
    """
    folder = resolve_model(role.speculation.draft_uri, progress)
    with _named(role):
        config = read_model_config(target)
        if not role.speculation.has_head:
            check_same_tokens(target, folder, config.vocab_size, read_model_config(folder).vocab_size)
            return
        head = HeadFolder(folder)
        head.shape.check_target(config.hidden_size, config.num_hidden_layers)
        check_same_tokens(target, folder, config.vocab_size, head.shape.vocab_size)
        head.targets(config.vocab_size)
        told, read = role.speculation.fused, head.shape.read_layers(config.num_hidden_layers)
        if told != read and (told or role.stages > 1):
            raise InputError(
                f"it reads the outputs of the layers {list(read)}, by the plan stages hand on those of {list(told)}: the head has changed since; plan again"
            )


def load_drafter(role: Role, model: StageModel, progress: Callable[[], None]) -> Drafter:
    """What the leader of this role drafts with. `model`: its part of that which verifies; a head's layers in it are watched from now on.

    Raises InputError for whatever `load_stage` refuses.
    """
    folder = resolve_model(role.speculation.draft_uri, progress)
    with _named(role):
        if role.speculation.has_head:
            return _head(role, folder, model)
        return _small_model(role, folder, model, progress)


def _small_model(role: Role, folder: Path, model: StageModel, progress: Callable[[], None]) -> Drafter:
    config = read_model_config(folder)
    whole = _whole(role, config.num_hidden_layers)
    small = load_stage(whole, folder, lambda *_: progress(), model.device)
    positions = getattr(config, "max_position_embeddings", 0) or role.max_model_len
    return Drafter(SmallModel(small, model.vocab_size), cache_of(whole, small), positions)


def _head(role: Role, folder: Path, model: StageModel) -> Drafter:
    """What it stored of its drafts follows from its own states, not from those of the model: it is computed again."""
    found = HeadFolder(folder)
    fused = found.shape.fused_layers(model.whole_layers)
    with torch.inference_mode():
        head = found.load(model.vocab_size, model.embed, model.dtype, model.device)
    guesser = HeadGuesser(head, role.kv_page_budget * role.page_tokens, fused)
    cache = PagedKvCache(
        num_layers=1,
        first_layer=LAYER,
        pages=role.kv_page_budget,
        page_tokens=role.page_tokens,
        kv_heads=found.shape.kv_heads,
        head_dim=found.shape.head_dim,
        dtype=model.dtype,
        device=model.device,
        kv_bits=role.kv_bits,
    )
    first, last = role.layers
    model.watch([layer for layer in sorted(set(fused)) if first <= layer <= last])
    return Drafter(guesser, cache, found.shape.positions, keeps_drafts=False)


@contextlib.contextmanager
def _named(role: Role) -> Iterator[None]:
    """Errors say which of the two models they are about."""
    try:
        yield
    except (RuntimeFaultError, UnsupportedModelError) as error:
        raise InputError(f"draft model {role.speculation.draft_uri}: {error}") from error


def _whole(role: Role, layers: int) -> Role:
    """All layers of the small model as one stage, with a pool of as many pages."""
    return structs.replace(
        role,
        model_uri=role.speculation.draft_uri,
        stages=1,
        layers=(0, layers - 1),
        bits=(16,) * layers,
        format=("dense",) * layers,
        embedding=True,
        head=True,
        speculation=NO_SPECULATION,
        drafts=False,
    )
