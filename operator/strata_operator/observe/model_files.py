"""Where a model's config.json comes from: `file:///path`, `hf://owner/name[@revision]` or `pvc://claim/path`, read for planning.

Called by the command line and the operator before they plan; the weights themselves are read by the slots alone.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_operator.decide.planning import BesideModel
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe.hub import MOST_BYTES, fetch
from strata_operator.observe.shards import shard_problems
from strata_planner.contract.calibration import CALIBRATION_FILE, Calibration
from strata_planner.contract.model_folder import ACTIVATIONS_FILE, ANY_PRECISION_FOLDER, Manifest
from strata_planner.contract.quantization import with_old_description
from strata_planner.contract.values import ContractError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's config.json, and where exactly it is from: an `hf://` uri with the commit, wherever the hub names it."""

    config: dict[str, Any]
    uri: str


def read_model(uri: str, environment: Mapping[str, str] = os.environ, token: str = "") -> ModelConfig:
    """The model's config.json, with what an old GPTQ checkpoint says of itself in a file of its own. `token`: for the hub.

    Raises InvalidInputError (change the uri) and NotReadyError (the hub is busy or does not answer).
    """
    if uri.startswith("hf://"):
        fetched = fetch(uri, "config.json", environment, token)
        return ModelConfig(_parse(fetched.data, uri), fetched.uri)
    folder = _visible_folder(uri, environment)
    assert folder is not None, "only hf:// models have none"
    data = _read_claim(uri, environment) if uri.startswith("pvc://") else _read(uri)
    return ModelConfig(with_old_description(_parse(data, uri), folder), uri)


def read_config(uri: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """For whoever needs no commit. Raises the same."""
    return read_model(uri, environment).config


def read_calibration(
    uri: str, config: dict[str, Any], environment: Mapping[str, str] = os.environ
) -> Calibration | None:
    """What `strata sensitivity` left beside the checkpoint, if it lies in a folder that can be seen here and has one.

    Raises InvalidInputError for a file of another model or release.
    """
    folder = _visible_folder(uri, environment)
    if folder is None or not (file := folder / CALIBRATION_FILE).is_file():
        return None
    try:
        return Calibration.from_file(file, config)
    except ContractError as error:
        raise InvalidInputError(uri, [str(error)]) from error


def read_beside(uri: str, config: dict[str, Any], environment: Mapping[str, str] = os.environ) -> BesideModel:
    """What earlier commands left beside the checkpoint. Raises InvalidInputError."""
    folder = _visible_folder(uri, environment)
    activations = folder is not None and (folder / ACTIVATIONS_FILE).is_file()
    return BesideModel(read_calibration(uri, config, environment), _copied_bits(folder), activations)


def check_shards(uri: str, environment: Mapping[str, str] = os.environ) -> None:
    """Before a plan sends slots to load it. Raises NotReadyError for files that are cut off or missing, where they can be seen:
    they may be on their way still.
    """
    folder = _visible_folder(uri, environment)
    if folder is not None and (problems := [*shard_problems(folder)]):
        raise NotReadyError(f"{uri}: {'; '.join(problems)}")


def _copied_bits(folder: Path | None) -> tuple[int, ...]:
    """Widths of the finished any-precision copy that lies there, none without one; slots check it before they use it."""
    try:
        manifest = folder and Manifest.of_folder(folder / ANY_PRECISION_FOLDER)
    except (ContractError, OSError):
        return ()
    if not manifest or manifest.missing:
        return ()
    return tuple(range(manifest.recipe.seed_bits, manifest.recipe.bits + 1))


def _visible_folder(uri: str, environment: Mapping[str, str]) -> Path | None:
    """The model's folder, where this process can see one."""
    if uri.startswith("hf://"):
        return None
    return _claim_folder(uri, environment) if uri.startswith("pvc://") else local_folder(uri)


def local_folder(uri: str) -> Path:
    """The folder of a `file:///path`."""
    return Path(uri.removeprefix("file://"))


def beside(uri: str, deployment_file: Path) -> str:
    """A `file:///` uri as it holds on this machine: where there is no such folder, its path is tried below the folder of
    the deployment's file, so that one object names `/models/x` both in a pod that mounts it and in a checkout.
    """
    if not uri.startswith("file:///") or local_folder(uri).is_dir():
        return uri
    folder = deployment_file.resolve().parent / uri.removeprefix("file:///")
    return f"file://{folder}" if folder.is_dir() else uri


def _read(uri: str) -> bytes:
    folder = local_folder(uri)
    if not folder.is_dir():
        raise InvalidInputError(
            uri, [f"there is no folder {folder}; write the path of a model folder with config.json"]
        )
    try:
        return _read_bounded(folder / "config.json")
    except OSError as error:
        raise InvalidInputError(
            uri,
            [f"{folder}/config.json: {error.strerror}; a model folder holds config.json, tokenizer and safetensors"],
        ) from error


def _claim_folder(uri: str, environment: Mapping[str, str]) -> Path:
    """Where slots mount claims too: `<models>/<claim>/<path>`."""
    return Path(environment.get("STRATA_MODELS_DIRECTORY", "/models"), uri.removeprefix("pvc://"))


def _read_claim(uri: str, environment: Mapping[str, str]) -> bytes:
    folder = _claim_folder(uri, environment)
    try:
        return _read_bounded(folder / "config.json")
    except OSError as error:
        claim = uri.removeprefix("pvc://").partition("/")[0]
        reason = (
            f"{folder}/config.json: {error.strerror}; planning reads it, so mount the claim {claim} below /models in the "
            "operator too (volumes and volumeMounts of the chart; operator and claim in one namespace), or use hf://"
        )
        raise InvalidInputError(uri, [reason]) from error


def _read_bounded(file: Path) -> bytes:
    """Raises OSError. A device or a pipe is no config, and neither is what no model's config is as large as."""
    if file.exists() and not file.is_file():
        raise OSError(0, "is no regular file")
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(0, f"is larger than {MOST_BYTES >> 20} MiB")
    return data


def _parse(data: bytes, uri: str) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(uri, [f"config.json is not valid JSON: {error}"]) from error
    if not isinstance(config, dict):
        raise InvalidInputError(uri, ["config.json must hold an object with model_type"])
    return config
