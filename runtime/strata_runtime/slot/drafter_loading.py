"""Loading the small model that drafts: whole, at 16 bits, beside the leader's own layers. Called by the slot's prepare."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from msgspec import structs

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.plan import NO_SPECULATION
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError, RuntimeFaultError
from strata_runtime.loading.load import load_stage
from strata_runtime.loading.quantized import read_model_config
from strata_runtime.loading.same_tokens import check_same_tokens
from strata_runtime.loading.uri import resolve_model
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.role_cache import cache_of


def check_draft_model(role: Role, target: Path, progress: Callable[[], None]) -> None:
    """Before anything is loaded for it. `target`: the folder of the model that verifies.

    Raises InputError for a model of other tokens, and for what is no model.
    """
    folder = resolve_model(role.speculation.draft_uri, progress)
    with _named(role):
        rows, own = read_model_config(target).vocab_size, read_model_config(folder).vocab_size
        check_same_tokens(target, folder, rows, own)


def load_drafter(role: Role, vocabulary: int, device: torch.device, progress: Callable[[], None]) -> Drafter:
    """What the leader of this role drafts with. `vocabulary`: rows of the embedding of the model that verifies.

    Raises InputError for whatever `load_stage` refuses.
    """
    folder = resolve_model(role.speculation.draft_uri, progress)
    with _named(role):
        config = read_model_config(folder)
        whole = _whole(role, config.num_hidden_layers)
        model = load_stage(whole, folder, lambda *_: progress(), device)
    positions = getattr(config, "max_position_embeddings", 0) or role.max_model_len
    return Drafter(model, cache_of(whole, model), positions, vocabulary)


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
