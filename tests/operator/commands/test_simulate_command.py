"""`strata simulate`: arrivals from numbers or a file, tables or JSON, and what it says about wrong input."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from strata_operator import cli
from strata_operator.commands.errors import exit_code

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = ROOT / "examples/clusters/two-unlike-cpus.yaml"
DEPLOYMENT = f"""
apiVersion: strata.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: quick}}
spec:
  model: {{uri: "file://{ROOT}/examples/models/strata-tiny", maxModelLen: 512}}
  workload: {{promptTokens: 64, outputTokens: 64, concurrency: 8}}
  placement: {{minStages: 2}}
  precision: {{allowed: [4]}}
"""  # of the quickstart's model, planned in a moment
Simulated = Callable[..., Result]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,40,8\n2023-11-16 18:15:48.0,9000,16\n"


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_operator.commands.simulate.leave_on_signals", lambda: None)
    monkeypatch.setattr("strata_operator.commands.simulate.log_to", lambda _: None)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    file = tmp_path_factory.mktemp("quick") / "deployment.yaml"
    file.write_text(DEPLOYMENT, encoding="utf-8")
    asked = ["simulate", "-f", str(file), "--cluster", str(CLUSTER)]
    return lambda *arguments: CliRunner().invoke(cli.app, [*asked, *arguments])


def test_json_is_the_figures_and_nothing_else(simulated: Simulated) -> None:
    result = simulated("--rate", "2", "--requests", "20", "--slo", "100", "10", "--json", "--costs", "roofline")
    figures = json.loads(result.stdout)
    assert (figures["requests"], figures["finished"], figures["refused"]) == (20, 20, 0)
    assert figures["attainment"] == 1.0
    assert figures["costs"] == ["roofline, assumed"]
    assert figures["latencySeconds"]["p50"] > figures["ttftSeconds"]["p50"] > 0
    assert len(figures["replicas"][0]["utilisation"]) == 2


@pytest.mark.slow  # planner/simulate/test_simulation.py has the law
def test_the_same_seed_shows_the_same(simulated: Simulated) -> None:
    first, again, other = (simulated("--rate", "2", "--requests", "20", "--json", "--seed", seed) for seed in "112")
    assert first.stdout == again.stdout != other.stdout


def test_tables_say_what_was_refused_and_where_seconds_are_from(simulated: Simulated, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE, encoding="utf-8")
    shown = simulated("--trace", str(file), "--slo", "100", "10").stdout
    assert "2 requests in" in shown
    assert "1 requests refused: longer than the plan's maxModelLen" in shown
    assert "50.0% of the requests within 100 s to the first token" in shown
    assert "seconds from: roofline" in shown


@pytest.mark.slow
def test_without_arrivals_the_workloads_requests_are_in_flight(simulated: Simulated) -> None:
    """A closed loop: what the plan predicts is what comes of it."""
    figures = json.loads(simulated("--requests", "60", "--json", "--costs", "roofline").stdout)
    assert figures["finished"] == figures["requests"] > 60
    shown = simulated("--requests", "60", "--clients", "2", "--costs", "roofline").stdout
    assert "a closed loop of 2: " in shown
    assert "the plan predicts" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "2", "--clients", "3"), "--rate 2 and --clients 3: requests come at a rate or as others end"),
        (("--rate", "0"), "a rate above 0"),
        (("--rate", "inf"), "a rate above 0"),
        (("--slo", "-1", "0.1"), "--slo -1 0.1: both must be above 0"),
        (("--trace", "/nowhere.csv"), "name a csv file that can be read"),
    ],
)
def test_wrong_arrivals_are_wrong_input(simulated: Simulated, arguments: tuple[str, ...], message: str) -> None:
    error = simulated(*arguments).exception
    assert error is not None
    assert message in str(error)
    assert exit_code(error) == 2
