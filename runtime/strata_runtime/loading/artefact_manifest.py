"""What `strata quantize` writes, one any-precision copy of a model's linears: its layout, where a node keeps one, its manifest read and written.

Called by `artefact` and `artefact_writer`; the manifest itself is `contract.model_folder`. Layout of a layer's file (safetensors): for each linear, by its path in the model,
`<key>.plane_0` ... (uint8 [N, columns / 8], one after the other, the most significant first, see `formats.planes.planes`), then
`<key>.table_3` ... (float16 [N, 2^k]). What stays at 16 bits (embedding, norms, biases, head) stays in the checkpoint.
"""

from pathlib import Path

from strata_planner.contract import store
from strata_planner.contract.model_folder import MANIFEST_FILE, Manifest, Recipe
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError
from strata_runtime.model import layer_paths

AGAIN = "run `strata quantize` again"


def layer_of(key: str) -> int:
    """The decoder layer that a linear belongs to, from its path in the model."""
    layer = layer_paths.layer_of(key)
    if layer is None:
        raise InputError(f"'{key}' is no linear of a decoder layer; keys look like model.layers.0.mlp.down_proj")
    return layer


def part_names(recipe: Recipe) -> list[str]:
    """Of a linear's tensors, in the order of their file."""
    widths = range(recipe.seed_bits, recipe.bits + 1)
    return [*(f"plane_{place}" for place in range(recipe.bits)), *(f"table_{bits}" for bits in widths)]


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises InputError for one that cannot be read or is of another version."""
    try:
        return Manifest.of_folder(folder)
    except ContractError as error:
        raise InputError(f"{error}: {AGAIN}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Whole or not at all."""
    store.write_whole(folder / MANIFEST_FILE, manifest.encode())


def cache_folder(digest: str) -> Path:
    """Where a node keeps the artefact of a model whose own folder cannot be written."""
    return store.cache_folder() / "quantized" / digest
