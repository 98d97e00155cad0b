"""A load that takes what was kept equals one that reads, of every kind of checkpoint, and reads nothing that was kept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from strata_planner.contract.formats import FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.roles import Role
from strata_planner.contract.shadows import ShadowOrder
from strata_runtime.loading import artefact, checkpoint
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.shadow import Shadow, file_state
from strata_runtime.loading.shadow_places import read_slowly, wanted_of
from strata_runtime.model.random_model import make_random_model
from tests.laws import swept
from tests.runtime.architectures import REPRESENTATIVE, make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.float8_models import make_float8_model
from tests.runtime.loading.gptq_models import formats_of, make_gptq_model
from tests.runtime.loading.stages import CPU, Stages, roles

SHAPES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each tensor that a load fills from a file."""
    found: list[int] = []
    real_fill, real_planes = checkpoint._fill, artefact._Opened.fill

    def fill(file: Any, key: str, flat: torch.Tensor) -> None:
        found.append(flat.nbytes)
        real_fill(file, key, flat)

    def planes(opened: Any, tensors: Sequence[torch.Tensor], offset: int, **options: Any) -> Any:
        found.extend(each.nbytes for each in tensors)
        return real_planes(opened, tensors, offset, **options)

    monkeypatch.setattr(checkpoint, "_fill", fill)
    monkeypatch.setattr(artefact._Opened, "fill", planes)
    return found


def kept(role: Role, folder: Path) -> Shadow:
    """All that the role would read."""
    first, last = role.layers
    order = ShadowOrder(
        model_uri=role.model_uri,
        compute_type=role.compute_type,
        layers=tuple(range(first, last + 1)),
        formats=tuple((name,) for name in role.format),
        most_bytes=1 << 40,
        embedding=role.embedding,
        head=role.head,
    )
    shadow = Shadow()
    for place, wanted in wanted_of(order, folder).items():
        shadow.put(place, read_slowly(wanted, lambda _: None, pinned=False), file_state(place.file), wanted.layer)
    return shadow


def logits(stages: Stages) -> torch.Tensor:
    """Of a text of eight tokens, computed at once."""
    return stages.step({0: torch.arange(8)}, [Segment(0, 0, 8, 8)])


def from_shadows(folder: Path, listed: Sequence[Role]) -> tuple[Stages, list[Shadow]]:
    """The same stages, each loaded of what was kept for it."""
    stages, shadows = Stages(folder, listed), [kept(role, folder) for role in listed]
    stages.models = [
        load_stage(role, folder, lambda *_: None, CPU, LoadOptions(shadow=shadow))
        for role, shadow in zip(listed, shadows, strict=True)
    ]
    return stages, shadows


def plain(folder: Path) -> Path:
    return make_random_model(folder, "llama", tie_word_embeddings=False, **SHAPES)


def gptq(folder: Path) -> Path:
    make_gptq_model(plain(folder / "plain"), folder / "gptq", {"bits": 4, "group_size": 32, "desc_act": True})
    return folder / "gptq"


def float8(folder: Path) -> Path:
    make_float8_model(plain(folder / "plain"), folder / "float8")
    return folder / "float8"


def copied(folder: Path) -> Path:
    model = plain(folder / "plain")
    write_artefact(model, layers=2)
    return model


Making = Callable[[Path], Path]
KINDS: dict[str, tuple[Making, FormatName | None]] = {
    "dense": (plain, "dense"),
    "int4": (plain, "int4"),
    "gptq": (gptq, None),
    "fp8_block": (float8, None),
    "any3": (copied, "any3"),
    "any6": (copied, "any6"),
}


@pytest.mark.parametrize("kind", swept(KINDS, ("int4", "gptq", "fp8_block", "any3")))
def test_a_load_from_a_shadow_equals_one_from_files_and_reads_none(tmp_path: Path, kind: str, read: list[int]) -> None:
    make, name = KINDS[kind]
    folder = make(tmp_path)
    formats = formats_of(folder) if name is None else [name] * 2
    (role,) = roles(folder, 1, formats=formats)
    wanted = logits(Stages(folder, [role]))
    shadow = kept(role, folder)
    held = shadow.held_bytes
    stages = Stages(folder, [role])
    before = len(read)
    stages.models = [load_stage(role, folder, lambda *_: None, CPU, LoadOptions(shadow=shadow))]
    assert read[before:] == []
    assert (shadow.held_bytes, shadow.given_bytes) == (0, held)
    assert held > 0
    assert torch.equal(logits(stages), wanted)


@pytest.mark.slow  # the kinds above are one architecture in every format
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_other_architectures_load_from_a_shadow_as_from_files(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "model", name)
    listed = roles(folder, 2)
    stages, shadows = from_shadows(folder, listed)
    assert all(shadow.given_bytes for shadow in shadows)
    assert torch.equal(logits(stages), logits(Stages(folder, listed)))


def test_half_a_shadow_gives_its_half(tmp_path: Path) -> None:
    """Of other bits: the planes that both have."""
    folder = copied(tmp_path)
    (role,) = roles(folder, 1, formats=["any6"] * 2)
    narrow = structs.replace(role, format=("any4",) * 2, bits=(4,) * 2)
    shadow = kept(narrow, folder)
    shadow.keep_layers({1, None})
    stages = Stages(folder, [role])
    stages.models = [load_stage(role, folder, lambda *_: None, CPU, LoadOptions(shadow=shadow))]
    assert shadow.given_bytes > 0
    assert torch.equal(logits(stages), logits(Stages(folder, [role])))
