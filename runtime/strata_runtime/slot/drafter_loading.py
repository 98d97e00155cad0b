"""Loading the small model that drafts: whole, at 16 bits, beside the leader's own layers. Called by the slot's prepare."""

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import structs

from strata_planner.contract.plan import NO_SPECULATION
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.quantized import read_model_config
from strata_runtime.loading.same_tokens import check_same_tokens
from strata_runtime.loading.uri import resolve_model
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.role_cache import cache_of


def load_drafter(
    role: Role, target: Path, vocabulary: int, device: torch.device, progress: Callable[[], None]
) -> Drafter:
    """What the leader of this role drafts with. `target`: the folder of the model that verifies, `vocabulary`: rows of its embedding.

    Raises InputError for a model of other tokens, and what `load_stage` raises, named as the draft model's.
    """
    uri = role.speculation.draft_uri
    folder = resolve_model(uri, progress)
    try:
        config = read_model_config(folder)
        check_same_tokens(target, folder, vocabulary, config.vocab_size)
        whole = _whole(role, uri, config.num_hidden_layers)
        model = load_stage(whole, folder, lambda *_: progress(), device)
    except RuntimeFaultError as error:
        raise InputError(f"draft model {uri}: {error}") from error
    positions = getattr(config, "max_position_embeddings", 0) or role.max_model_len
    return Drafter(model, cache_of(whole, model), positions, vocabulary)


def _whole(role: Role, uri: str, layers: int) -> Role:
    """All layers of the small model as one stage, with a pool of as many pages."""
    return structs.replace(
        role,
        model_uri=uri,
        stages=1,
        layers=(0, layers - 1),
        bits=(16,) * layers,
        format=("dense",) * layers,
        embedding=True,
        head=True,
        speculation=NO_SPECULATION,
        drafts=False,
    )
