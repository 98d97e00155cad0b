"""`precision.method: auto` is any-precision where `strata quantize` finished a copy beside the model, else round to nearest."""

import json
from pathlib import Path

import msgspec
import pytest

from strata_operator.api import load_deployment
from strata_operator.decide.planning import request_for
from strata_operator.observe.model_files import read_beside, read_config
from strata_planner.contract.model_folder import (
    ANY_PRECISION_FOLDER,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    LayerFile,
    Manifest,
    Recipe,
)
from strata_planner.errors import WorkloadError
from tests.operator.builders import a_deployment
from tests.operator.commands.test_sensitivity import CLUSTER, deployment, folder  # noqa: F401  the fixture


def manifest_of(finished: int) -> Manifest:
    files = tuple(LayerFile(layer, 1, "0", {}) for layer in range(finished))
    return Manifest(MANIFEST_VERSION, "0", Recipe(), 2, files)


@pytest.mark.parametrize(
    ("manifest", "method"),
    [
        (manifest_of(2).encode(), "anyPrecision"),
        (manifest_of(1).encode(), "roundToNearest"),
        (msgspec.structs.replace(manifest_of(2), version=0).encode(), "roundToNearest"),
        (b"no manifest", "roundToNearest"),
        (None, "roundToNearest"),
    ],
    ids=["finished", "interrupted", "of another release", "damaged", "absent"],
)
def test_auto_takes_what_is_there(folder: Path, manifest: bytes | None, method: str) -> None:  # noqa: F811
    if manifest is not None:
        (folder / ANY_PRECISION_FOLDER).mkdir()
        (folder / ANY_PRECISION_FOLDER / MANIFEST_FILE).write_bytes(manifest)
    uri = f"file://{folder}"
    config = read_config(uri)
    asked = load_deployment(deployment(folder), source="test")
    assert request_for(asked, CLUSTER, config, beside=read_beside(uri, config)).method == method


@pytest.mark.parametrize(("allowed", "planned"), [([3, 5, 8, 16], (3, 5, 16)), ([6, 8], None)])
def test_only_widths_of_the_copy_are_planned(folder: Path, allowed: list[int], planned: tuple[int, ...] | None) -> None:  # noqa: F811
    uri = f"file://{folder}"
    config = read_config(uri)
    (folder / ANY_PRECISION_FOLDER).mkdir()
    five = msgspec.structs.replace(manifest_of(2), recipe=Recipe(bits=5))
    (folder / ANY_PRECISION_FOLDER / MANIFEST_FILE).write_bytes(five.encode())
    asked = a_deployment().with_spec(model={"uri": uri}, precision={"allowed": allowed}).build()
    if planned is None:
        with pytest.raises(WorkloadError, match=r"allowed \[6, 8\]: the model's any-precision copy has 3 to 5 bits"):
            request_for(asked, CLUSTER, config, beside=read_beside(uri, config), for_serving=False)
        return
    assert request_for(asked, CLUSTER, config, beside=read_beside(uri, config)).allowed_bits == planned


def test_an_old_gptq_checkpoint_says_what_it_is_in_a_file_of_its_own(folder: Path) -> None:  # noqa: F811
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    config = read_config(f"file://{folder}")
    request = request_for(load_deployment(deployment(folder), source="test"), CLUSTER, config)
    assert request.formats == {4: ("gptq4",), 16: ("dense",)}
