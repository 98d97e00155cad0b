"""`strata profile`, and what plan and up make of its files: a fake runtime stands in for the minutes of measuring."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from strata_operator.commands import profile as command
from strata_operator.commands.inputs import Question, read_question
from strata_operator.commands.plan import PlanOptions
from strata_operator.commands.plan import run as run_plan
from strata_operator.commands.profile import ProfileOptions, kept_profiles, profiles_for, read_profile, shown
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError
from strata_planner.contract.latencies import LatencyProfile, ProfiledDevice
from tests.planner.builders import a_config
from tests.planner.latency_profiles import a_latency_profile

DEPLOYMENT = """
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {uri: "file://%s", maxModelLen: 256}
  workload: {promptTokens: 32, outputTokens: 16, concurrency: 4}
  runtime: {computeType: bfloat16}
"""
CLUSTER = "nodes: [{name: a, devices: [{type: cpu, count: 1, threads: 1, memoryBytes: 400000000}]}]"


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(a_config()))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    file = tmp_path / "deployment.yaml"
    file.write_text(_header(DEPLOYMENT % folder))
    return file


def _header(text: str) -> str:
    """The API version that this checkout serves."""
    example = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    version = next(line for line in example.read_text().splitlines() if line.startswith("apiVersion"))
    return text.replace("apiVersion: strata.dev/v1alpha1", version)


def question(deployment: Path) -> Question:
    return read_question(deployment, deployment.with_name("cluster.yaml"), measure=False)


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "profile.json"
    file.write_bytes(a_latency_profile(**changes).encode())
    return file


def runtime_that(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "runtime.py"
    script.write_text(f"import sys\n{body}\n")
    monkeypatch.setattr(command, "PROFILE", (sys.executable, str(script)))


def options(**changes: Any) -> ProfileOptions:
    fields: dict[str, Any] = {
        "deployment": None,
        "cluster": None,
        "model": None,
        "threads": 0,
        "device": "cpu",
        "device_type": "cpu",
        "output": None,
        "quick": False,
        "fresh": False,
    }
    return ProfileOptions(**(fields | changes))


def test_measuring_ends_with_the_errors_of_points_left_out_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    runtime_that(f"print({str(file)!r})", tmp_path, monkeypatch)
    command.run(options(model=tmp_path, threads=2))
    judged = LatencyProfile.decode(file.read_bytes())
    assert set(judged.leave_one_out) == {f"{name} {phase}" for name in judged.layers for phase in ("prefill", "decode")}
    assert str(file) in capsys.readouterr().out.replace("\n", "")
    assert not list(tmp_path.glob("profile.[0-9]*"))


def test_a_deployment_says_whose_layers_on_how_many_threads(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    told = tmp_path / "arguments"
    runtime_that(f"open({str(told)!r}, 'w').write(' '.join(sys.argv[1:])); print({str(file)!r})", tmp_path, monkeypatch)
    command.run(options(deployment=deployment, cluster=deployment.with_name("cluster.yaml"), quick=True))
    words = told.read_text()
    for each in (f"--model {tmp_path / 'model'}", "--threads 1", "--compute-type bfloat16", "--quick"):
        assert each in words


@pytest.mark.parametrize(
    ("code", "error", "says"), [(2, InvalidInputError, "reason above"), (1, LocalError, "go on where it stopped")]
)
def test_a_runtime_that_fails_is_told(
    code: int, error: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_that(f"sys.exit({code})", tmp_path, monkeypatch)
    with pytest.raises(error, match=says):
        command.run(options(model=tmp_path))


@pytest.mark.parametrize("both", [True, False])
def test_one_model_is_named(*, both: bool, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give one of"):
        command.run(options(model=tmp_path, deployment=tmp_path) if both else options())


def test_a_plan_names_the_profile_that_it_is_from(
    deployment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = deployment.with_name("cluster.yaml")
    run_plan(PlanOptions(deployment, cluster, None, None, ("roofline",), True, False, False, written(tmp_path)))
    plan = json.loads(capsys.readouterr().out)
    assert plan["replicas"][0]["stages"][0]["times"]["source"].startswith("profile of llama 128 wide on cpu")


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def _of_another_version(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"version": 99}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncated, "not a valid LatencyProfile"),
        (_of_another_version, "version 99; this release reads version 1: run `strata profile` again"),
        (Path.unlink, "name a file that can be read"),
    ],
)
def test_a_file_that_is_no_profile_is_named_with_rule_and_fix(
    spoil: Any, says: str, deployment: Path, tmp_path: Path
) -> None:
    file = written(tmp_path)
    spoil(file)
    with pytest.raises(InvalidInputError, match=says) as refused:
        read_profile(file, question(deployment).request)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"heads": 8}}, "this model's layers differ: run `strata profile`"),
        ({"device": ProfiledDevice("cpu", "a processor", 8, "2.0")}, "measured on 8 threads of 'cpu'"),
        ({"compute_type": "float32"}, "in float32; no device of the cluster is that"),
    ],
)
def test_a_profile_that_answers_nothing_is_refused(
    changes: dict[str, Any], says: str, deployment: Path, tmp_path: Path
) -> None:
    profile = a_latency_profile()
    if "model" in changes:
        changes = {"model": msgspec.structs.replace(profile.model, **changes["model"])}
    with pytest.raises(InvalidInputError, match=says):
        read_profile(written(tmp_path, **changes), question(deployment).request)


def test_kept_profiles_are_found_where_rates_are_measured(
    deployment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    runtime_that(f"print({str(file)!r}); sys.exit('--kept' not in sys.argv)", tmp_path, monkeypatch)
    asked = question(deployment)
    assert [source.profile for source in kept_profiles(asked.request, [1])] == [a_latency_profile()]
    assert profiles_for(asked, None, kept=False) == ()
    runtime_that("sys.exit(1)", tmp_path, monkeypatch)
    assert profiles_for(asked, None, kept=True) == ()


def test_the_table_has_a_row_for_each_format_and_phase() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown(a_latency_profile(leave_one_out={"int4 decode": 0.0123})))
    text = console.export_text()
    assert "1.2%" in text
    assert text.count("decode") == text.count("prefill") == 4
