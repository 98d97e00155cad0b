"""`precision.method: auto` is any-precision where `strata quantize` finished a copy beside the model, else round to nearest."""

import json
from pathlib import Path

import pytest

from strata_operator.api import load_deployment
from strata_operator.model_files import read_beside, read_config
from strata_operator.planning import request_for
from tests.operator.test_sensitivity import CLUSTER, deployment, folder  # noqa: F401  the fixture


@pytest.mark.parametrize(
    ("manifest", "method"),
    [
        ({"layers": 2, "files": [{}, {}]}, "anyPrecision"),
        ({"layers": 2, "files": [{}]}, "roundToNearest"),
        ("no manifest", "roundToNearest"),
        (None, "roundToNearest"),
    ],
    ids=["finished", "interrupted", "damaged", "absent"],
)
def test_auto_takes_what_is_there(folder: Path, manifest: object, method: str) -> None:  # noqa: F811
    if manifest is not None:
        (folder / "strata-any").mkdir()
        (folder / "strata-any" / "manifest.json").write_text(json.dumps(manifest))
    uri = f"file://{folder}"
    config = read_config(uri)
    asked = load_deployment(deployment(folder), source="test")
    assert request_for(asked, CLUSTER, config, beside=read_beside(uri, config)).method == method


def test_an_old_gptq_checkpoint_says_what_it_is_in_a_file_of_its_own(folder: Path) -> None:  # noqa: F811
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    config = read_config(f"file://{folder}")
    request = request_for(load_deployment(deployment(folder), source="test"), CLUSTER, config)
    assert request.formats == {4: ("gptq4",), 16: ("dense",)}
