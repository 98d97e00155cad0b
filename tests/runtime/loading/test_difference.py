"""Laws of a stage that is made of what another holds: it is the one that is loaded whole, bit for bit, and what is read is what is missing."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT, ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, Recipe
from strata_planner.contract.plan import Speculation
from strata_planner.contract.roles import Role
from strata_runtime.loading import checkpoint as checkpoint_module
from strata_runtime.loading.artefact import Artefact
from strata_runtime.loading.layer_store import LayerStore, kept_bytes
from strata_runtime.loading.linear_source import ANY_FORMATS
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS, format_of, read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from tests.laws import share, swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import write_artefact
from tests.runtime.loading.stages import CPU, roles

torch.set_num_threads(1)

LAYERS = 6
FORMATS: list[FormatName] = ["dense", "any3", "any4", "any4_a8", "any8", "int8"]
LINEARS = 7  # of a layer of the tiny Llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    write_artefact(folder, layers=LAYERS)
    return folder


@dataclass
class Reads:
    """What loads have read: tensors of the checkpoint by name, planes and tables of the copy by linear."""

    tensors: list[str] = field(default_factory=list)
    planes: list[tuple[str, int]] = field(default_factory=list)
    tables: list[tuple[str, int]] = field(default_factory=list)

    def clear(self) -> None:
        for each in (self.tensors, self.planes, self.tables):
            each.clear()

    def layers(self) -> set[int]:
        names = (*self.tensors, *(key for key, _ in (*self.planes, *self.tables)))
        return {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}

    def outside(self) -> set[str]:
        return {name for name in self.tensors if not name.startswith("model.layers.")}


@pytest.fixture(scope="module")
def reads() -> Iterator[Reads]:
    seen = Reads()
    read, planes, table = checkpoint_module._read, Artefact._planes, Artefact.table

    def read_tensor(file: Any, key: str, *arguments: Any, **named: Any) -> torch.Tensor:
        seen.tensors.append(key)
        return read(file, key, *arguments, **named)

    def read_planes(self: Artefact, key: str, places: range, *cut: Any) -> tuple[torch.Tensor, ...]:
        seen.planes.extend((key, place) for place in places)
        return planes(self, key, places, *cut)

    def read_table(self: Artefact, key: str, bits: int, *arguments: Any, **named: Any) -> torch.Tensor:
        seen.tables.append((key, bits))
        return table(self, key, bits, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "_read", read_tensor)
        patch.setattr(Artefact, "_planes", read_planes)
        patch.setattr(Artefact, "table", read_table)
        yield seen


def role_of(
    model: Path,
    layers: tuple[int, int],
    formats: Sequence[FormatName] | None = None,
    compute_type: ComputeType = "float32",
    **fields: Any,
) -> Role:
    """Of layers first and last; the first stage embeds, the last has the head. `formats`: of those layers."""
    (whole,) = roles(model, 1, compute_type=compute_type)
    names = tuple(formats or ("dense",) * (layers[1] - layers[0] + 1))
    bits = tuple(BITS_OF_FORMAT[name] for name in names)
    ends = {"embedding": layers[0] == 0, "head": layers[1] == whole.layers[1]}
    return structs.replace(whole, layers=layers, format=names, bits=bits, **{**ends, **fields})


def load(role: Role, store: LayerStore | None = None) -> StageModel:
    return load_stage(role, Path(role.model_uri), lambda *_: None, CPU, LoadOptions(store=store))


def store_of(*stages: StageModel) -> LayerStore:
    store = LayerStore()
    for stage in stages:
        store.put(*stage.parts())
    return store


def outputs(stage: StageModel, role: Role, *, draft: bool = False) -> torch.Tensor:
    """Of a prompt of 9 tokens and a step after it."""
    blocks, cache = OwnBlocks(role.replica_page_budget, role.page_tokens), cache_of(role, stage)
    generator = torch.Generator().manual_seed(1)
    computed = []
    for segment in (Segment(1, 0, 9, 9), Segment(1, 9, 1, 1)):
        tokens = torch.randint(3, 96, (segment.length,), generator=generator)
        hidden = torch.randn(segment.length, stage.hidden_size, generator=generator).to(stage.dtype)
        inputs = tokens if role.embedding else hidden
        computed.append(stage.forward(inputs, cache.plan(blocks.deal([segment])), draft=draft))
    return torch.cat(computed)


def tensors(stage: StageModel) -> dict[str, torch.Tensor]:
    module = stage._stage.module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(got: StageModel, whole: StageModel, role: Role) -> None:
    mine, its = tensors(got), tensors(whole)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    layers = range(role.layers[0], role.layers[1] + 1)
    for number in layers:
        formats = [[format_of(linear) for linear in stage.linears(number).values()] for stage in (got, whole)]
        assert formats[0] == formats[1]
    assert torch.equal(outputs(got, role), outputs(whole, role))


@st.composite
def roles_of_any_layers(draw: st.DrawFn) -> tuple[tuple[int, int], list[FormatName]]:
    first, last = sorted(draw(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1))))
    count = last - first + 1
    return (first, last), draw(st.lists(st.sampled_from(FORMATS), min_size=count, max_size=count))


@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["float32"]))
@settings(max_examples=share(80, 16), deadline=None)
@given(wanted=st.lists(roles_of_any_layers(), min_size=2, max_size=3))
def test_a_stage_by_difference_is_the_one_loaded_whole_and_reads_what_is_missing(
    model: Path, reads: Reads, compute_type: ComputeType, wanted: list[tuple[tuple[int, int], list[FormatName]]]
) -> None:
    stage: StageModel | None = None
    held: dict[int, FormatName] = {}
    for layers, formats in wanted:
        role = role_of(model, layers, formats, compute_type)
        names = dict(zip(range(layers[0], layers[1] + 1), formats, strict=True))
        before = stage
        reads.clear()
        stage = load(role, store_of(before) if before else None)
        missing = {number for number, name in names.items() if not becomes(held.get(number), name)}
        moved = {number: name for number, name in names.items() if number not in missing and held[number] != name}
        assert reads.layers() == missing | {n for n, name in moved.items() if bits_of(name) != bits_of(held[n])}
        for number, name in moved.items():
            read = [place for key, place in reads.planes if f".{number}." in key]
            assert sorted(read) == sorted([*range(bits_of(held[number]), bits_of(name))] * LINEARS)
            assert not [key for key in reads.tensors if f"layers.{number}." in key]
        if before is not None:
            assert_shares(stage, before, [n for n in names if n not in missing and n not in moved])
        held = names
        assert_same(stage, load(role), role)


def becomes(held: FormatName | None, name: FormatName) -> bool:
    return held is not None and (held == name or {held, name} <= ANY_FORMATS)


def bits_of(name: FormatName) -> int:
    return BITS_OF_FORMAT[name]


def assert_shares(stage: StageModel, before: StageModel, layers: Sequence[int]) -> None:
    for number in layers:
        mine, its = (dict(each._stage.layer(number).named_parameters()) for each in (stage, before))
        mine |= dict(stage._stage.layer(number).named_buffers())
        its |= dict(before._stage.layer(number).named_buffers())
        assert mine.keys() == its.keys()
        assert all(mine[name].data_ptr() == its[name].data_ptr() for name in mine)


def test_a_neighbour_that_takes_over_reads_the_lost_layers_alone(model: Path, reads: Reads) -> None:
    held = load(role_of(model, (0, 3)))
    reads.clear()
    role = role_of(model, (0, 5))
    taken = load(role, store_of(held))
    assert reads.layers() == {4, 5}
    assert reads.outside() == {"model.norm.weight", "lm_head.weight"}
    assert_same(taken, load(role), role)
    reads.clear()
    last = role_of(model, (2, 5))
    assert_same(load(last, store_of(taken)), load(last), last)


def test_what_is_shared_counts_once_and_ends_with_the_last_who_has_it(model: Path) -> None:
    held = load(role_of(model, (0, 3), ["any8"] * 4))
    role = role_of(model, (1, 4), ["any8", "any4", "any4", "any8"])
    store = store_of(held)
    store.keep([role])
    told = store.kept_bytes(role)
    taken = load(role, store)
    shared = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(held).values()}
    both = {
        pointer: shared[pointer] for pointer in (t.data_ptr() for t in tensors(taken).values()) if pointer in shared
    }
    rotary = sum(buffer.nbytes for name, buffer in held._stage.module.named_buffers() if "rotary" in name)
    assert told == sum(both.values()) - (rotary if sum(both.values()) != told else 0)
    assert 0 < told < kept_bytes([taken._stage.module], None)


def test_what_no_role_wants_is_let_go(model: Path) -> None:
    store = store_of(load(role_of(model, (0, 3), ["any8", "int8", "dense", "any4"])))
    store.keep([role_of(model, (1, 3), ["any4", "any4", "any8"])])
    assert [part.number for part in store.parts() if hasattr(part, "number")] == [3]
    store.keep([role_of(model, (3, 3), ["any8"], "bfloat16")])
    assert not store.parts()


@pytest.mark.parametrize(
    "name",
    swept(
        ["llama-tied-bias", "gpt2", "bloom", "gemma2", "qwen3_next", "deepseek_v3", "gpt_oss", "mixtral", "lfm2"],
        ["gpt2"],
    ),
)
@pytest.mark.parametrize("layer_format", swept(["dense", "int8"], ["int8"]))
def test_parts_of_any_architecture_are_taken_over(name: str, layer_format: FormatName, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, name)
    ranges = [(0, 3), (0, 5), (0, 2), (2, 5), (2, 4), (0, 5)]
    stage: StageModel | None = None
    keeps = {"state_slots": 2, "prefix_caching": False}
    for layers in ranges:
        role = role_of(folder, layers, [layer_format] * (layers[1] - layers[0] + 1), **keeps)
        stage = load(role, store_of(stage) if stage else None)
        whole = load(role)
        mine, its = tensors(stage), tensors(whole)
        assert mine.keys() == its.keys()
        assert torch.equal(outputs(stage, role), outputs(whole, role))


@pytest.mark.parametrize("head_format", swept(["dense", "w8a8"], ["w8a8"]))
@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("tied", swept([False, True], [True]))
def test_embedding_and_head_come_and_go(
    tmp_path: Path, reads: Reads, head_format: FormatName, compute_type: ComputeType, *, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)
    stage: StageModel | None = None
    for layers in [(3, 5), (2, 5), (0, 5), (0, 5), (0, 2), (0, 3), (3, 5)]:
        role = role_of(folder, layers, compute_type=compute_type)
        role = structs.replace(role, head_format=head_format if role.head else "dense")
        reads.clear()
        before, stage = stage, load(role, store_of(stage) if stage else None)
        if before is not None and layers in {(2, 5), (0, 3)}:
            assert not reads.outside()
        assert_same(stage, load(role), role)


@pytest.mark.slow
@settings(max_examples=share(24), deadline=None)
@given(
    formats=st.lists(st.sampled_from(["any3", "any8", "dense"]), min_size=12, max_size=12),
    wishes=st.tuples(*[st.sampled_from([Speculation(), Speculation("selfPrecision", 4)])] * 2),
)
def test_drafts_are_those_of_a_stage_loaded_whole(
    model: Path, reads: Reads, formats: list[FormatName], wishes: tuple[Speculation, Speculation]
) -> None:
    stage: StageModel | None = None
    for wish, layers, names in zip(wishes, [(0, 4), (1, 5)], [formats[:5], formats[5:10]], strict=True):
        role = role_of(model, layers, names, speculation=wish)
        stage = load(role, store_of(stage) if stage else None)
        whole = load(role)
        assert_same(stage, whole, role)
        assert torch.equal(outputs(stage, role, draft=True), outputs(whole, role, draft=True))
    reads.clear()
    assert stage is not None
    load(role_of(model, (1, 4), formats[5:9], speculation=wishes[1]), store_of(stage))
    assert not reads.layers()


def test_a_layer_that_was_moved_is_taken_as_it_is_now(model: Path, reads: Reads) -> None:
    held = load(role_of(model, (0, 2), ["any8", "any8", "dense"]))
    for layer, bits in ((0, 3), (1, 16), (2, 4)):
        change = read_change(held, layer, bits)
        change.apply()
        change.release()
    reads.clear()
    role = role_of(model, (0, 2), ["any3", "dense", "any4"])
    taken = load(role, store_of(held))
    assert not reads.layers()
    assert_same(taken, load(role), role)


def test_stages_that_share_layers_change_bits_apart(model: Path) -> None:
    role = role_of(model, (0, 2), ["any8"] * 3)
    held = load(role)
    taken = load(role, store_of(held))
    change = read_change(taken, 1, 3)
    change.apply()
    change.release()
    assert_same(held, load(role), role)
    after = role_of(model, (0, 2), ["any8", "any3", "any8"])
    assert_same(taken, load(after), after)
    assert FORMAT_OF_BITS[3] == taken.held[1].format != held.held[1].format


def test_weights_of_other_files_are_not_taken(model: Path, tmp_path: Path, reads: Reads) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    role = role_of(folder, (0, 1), ["any4", "dense"])
    held = load(role)
    shutil.rmtree(folder / ANY_PRECISION_FOLDER)
    write_artefact(folder, layers=LAYERS, recipe=Recipe(bits=7))
    reads.clear()
    load(role, store_of(held))
    assert reads.layers() == {0}, "the copy was made anew"
    (folder / "model.safetensors").touch()
    reads.clear()
    load(role, store_of(held))
    assert reads.layers() == {0, 1}, "the checkpoint was changed"


def test_a_load_that_is_ended_leaves_its_whole_layers_to_the_next(model: Path, reads: Reads) -> None:
    class EndedError(Exception):
        pass

    def stop(done: int, _total: int) -> None:
        if done == 2:
            raise EndedError

    store = LayerStore()
    with pytest.raises(EndedError):
        load_stage(role_of(model, (0, 4)), model, stop, CPU, LoadOptions(store=store))
    reads.clear()
    role = role_of(model, (1, 4))
    taken = load(role, store)
    assert reads.layers() == {2, 3, 4}
    assert_same(taken, load(role), role)
