"""From the calibration beside a checkpoint to the planner's question, and the command that makes it."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata_operator.api import load_deployment
from strata_operator.cli import app
from strata_operator.commands import sensitivity as command
from strata_operator.commands.sensitivity import shown
from strata_operator.decide.planning import request_for
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_operator.observe.model_files import read_beside, read_calibration, read_config
from strata_planner.contract.calibration import (
    CALIBRATION_FILE,
    CALIBRATION_VERSION,
    Calibration,
    LayerStatistics,
    LinearStatistics,
    MeasuredLoss,
    fingerprint,
)
from strata_planner.errors import WorkloadError
from strata_planner.question.cluster import Cluster
from strata_planner.question.model import Model
from strata_planner.sensitivity import Sensitivity

TINY = Path(__file__).parents[3] / "examples" / "models" / "strata-tiny"
CLUSTER = Cluster.from_yaml("nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 900000000}]}]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of which planning sees config.json, and its calibration with invented statistics."""
    shutil.copy(TINY / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    layers = tuple(
        LayerStatistics(
            tuple(
                LinearStatistics(
                    each.name,
                    each.out_features,
                    each.in_features,
                    0.0,
                    1.0,
                    -1.0,
                    1.0,
                    1.0,
                    1.0,
                    {"3": 9.0, "4": 2.0, "8": 0.1},
                )
                for each in layer.linears
            )
        )
        for layer in Model.from_config(config).layers
    )
    measured = tuple(MeasuredLoss((bits,) * 12, 3.0 + rise, rise, 1e-6) for bits, rise in ((3, 0.09), (4, 0.02)))
    calibration = Calibration(
        CALIBRATION_VERSION,
        fingerprint(config),
        "text.txt",
        64,
        layers,
        held_back_tokens=64,
        loss=3.0,
        measured=measured,
    )
    (tmp_path / CALIBRATION_FILE).write_bytes(calibration.encode())
    return tmp_path


def deployment(folder: Path, objective: str = "{}") -> str:
    return (
        "apiVersion: strata.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: chat}\n"
        f"spec: {{model: {{uri: 'file://{folder}', maxModelLen: 256}}, objective: {objective}, "
        "workload: {promptTokens: 32, outputTokens: 16, concurrency: 2}}\n"
    )


def test_the_file_beside_the_checkpoint_is_used(folder: Path) -> None:
    uri = f"file://{folder}"
    config = read_config(uri)
    request = request_for(
        load_deployment(deployment(folder, "{maxPerplexityIncrease: 0.1}"), source="test"),
        CLUSTER,
        config,
        beside=read_beside(uri, config),
    )
    assert request.omega.source == "calibrated: deviation indicator, 64 tokens of text.txt"
    assert request.penalty_bound is not None
    assert 0 < request.penalty_bound < request.omega.total((4,) * 12)


def test_without_a_file_there_is_a_prior_and_no_bound(folder: Path) -> None:
    (folder / CALIBRATION_FILE).unlink()
    uri = f"file://{folder}"
    config = read_config(uri)
    assert read_calibration(uri, config) is None
    assert read_calibration("hf://owner/name", config) is None
    plain = request_for(load_deployment(deployment(folder), source="test"), CLUSTER, config)
    assert plain.penalty_bound is None
    assert plain.omega.source.startswith("prior")
    bounded = load_deployment(deployment(folder, "{maxPerplexityIncrease: 0.1}"), source="test")
    with pytest.raises(WorkloadError, match=r"maxPerplexityIncrease 0\.1 cannot be kept.*strata sensitivity"):
        request_for(bounded, CLUSTER, config)


def test_a_claim_has_its_file_too(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    environment = {"STRATA_MODELS_DIRECTORY": str(folder.parent)}
    assert read_calibration(f"pvc://{folder.name}", config, environment) is not None


def test_a_file_of_another_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    with pytest.raises(InvalidInputError, match="is of another model"):
        read_calibration(f"file://{folder}", config)


def test_the_plan_names_its_source(folder: Path) -> None:
    (folder / "chat.yaml").write_text(deployment(folder))
    (folder / "cluster.yaml").write_text(CLUSTER_YAML)
    run = CliRunner().invoke(
        app, ["plan", "-f", str(folder / "chat.yaml"), "--cluster", str(folder / "cluster.yaml"), "--json"]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["prediction"]["sensitivitySource"].startswith("calibrated: deviation indicator")


CLUSTER_YAML = "nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 900000000}]}]\n"
TABLES: dict[str, tuple[Callable[[Sensitivity], Sensitivity], str]] = {
    "with losses": (lambda table: table, "proportional curve through 2 measured losses"),
    "without": (lambda table: Sensitivity(table.source, table.omega), "sum"),
}


@pytest.mark.parametrize(("change", "says"), TABLES.values(), ids=TABLES)
def test_what_came_out_is_shown(folder: Path, change: Callable[[Sensitivity], Sensitivity], says: str) -> None:
    uri = f"file://{folder}"
    calibration = read_calibration(uri, read_config(uri))
    assert calibration is not None
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown(change(Sensitivity.from_statistics(calibration))))
    assert says in captured.get()


def test_only_what_lies_here_can_be_calibrated() -> None:
    run = CliRunner().invoke(app, ["sensitivity", "hf://owner/name"])
    assert isinstance(run.exception, InvalidInputError)
    assert "kept beside the weights" in str(run.exception)


def test_the_command_shows_what_the_runtime_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's part is tested with it; here a process stands in that names the file and was told everything."""
    said = f"import sys; print(*sys.argv[1:], file=sys.stderr); print({str(folder / CALIBRATION_FILE)!r})"
    monkeypatch.setattr(command, "CALIBRATE", (sys.executable, "-c", said))
    run = CliRunner().invoke(app, ["sensitivity", str(folder), "--tokens", "64", "--held-back-tokens", "0"])
    assert run.exit_code == 0, run.output
    assert "deviation indicator, 64 tokens of text.txt" in " ".join(run.stdout.split())
    assert f"kept in {folder / CALIBRATION_FILE}\n" in run.stdout


@pytest.mark.parametrize(("code", "kind"), [(2, InvalidInputError), (1, LocalError)])
def test_the_runtimes_refusal_is_the_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(command, "CALIBRATE", (sys.executable, "-c", f"raise SystemExit({code})"))
    run = CliRunner().invoke(app, ["sensitivity", str(folder)])
    assert isinstance(run.exception, kind)
