"""What `--costs` chooses, and what it says of choices that cannot be."""

from dataclasses import replace
from pathlib import Path

import pytest

from strata_operator.commands import costs
from strata_operator.commands.costs import latency_sources
from strata_operator.errors import InvalidInputError
from strata_planner.costs.operators import OperatorTables
from strata_planner.costs.tables import LayerTables
from strata_planner.errors import InputError

TABLE = """
devices: [T4]
source: a test
layer: {hiddenSize: 128, heads: 4, kvHeads: 2, headDim: 32, linearParameters: 196608}
decodeMilliseconds: {16: [[2, 5]]}
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> OperatorTables:
    tables = OperatorTables(Path("nowhere"), "1")
    monkeypatch.setattr(costs.OperatorTables, "installed", lambda: tables)
    return tables


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "t4.yaml"
    path.write_text(TABLE, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("chosen", [[], ["auto"]])
def test_without_a_choice_what_is_installed_is_used(installed: OperatorTables, chosen: list[str]) -> None:
    assert latency_sources(chosen) == (installed,)


def test_without_the_extra_the_roofline_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.OperatorTables, "installed", lambda: None)
    assert latency_sources(["auto"]) == ()


def test_the_roofline_can_be_asked_for(installed: OperatorTables) -> None:
    assert latency_sources(["roofline"]) == ()


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_tables_can_be_asked_for_as_an_engine_runs_them(installed: OperatorTables, file: str, engine: str) -> None:
    assert latency_sources([engine]) == (replace(installed, engine=engine),)
    assert latency_sources([file, engine])[-1] == replace(installed, engine=engine)


def test_an_engine_needs_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.OperatorTables, "installed", lambda: None)
    with pytest.raises(InvalidInputError, match=r"vllm needs the operator tables.*pip install"):
        latency_sources(["vllm"])


def test_one_engine_at_a_time(installed: OperatorTables) -> None:
    with pytest.raises(InvalidInputError, match="sglang and vllm: a plan is priced as one engine"):
        latency_sources(["vllm", "sglang"])


def test_files_come_before_what_is_installed(installed: OperatorTables, file: str) -> None:
    tables, operators = latency_sources([file])
    assert isinstance(tables, LayerTables)
    assert [table.devices for table in tables.tables] == [("T4",)]
    assert operators is installed


def test_the_roofline_and_tables_exclude_each_other(file: str) -> None:
    with pytest.raises(InvalidInputError, match="roofline means nothing else"):
        latency_sources(["roofline", file])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.yaml"):
        latency_sources([str(tmp_path / "none.yaml")])


def test_a_wrong_table_is_named(file: str) -> None:
    Path(file).write_text(TABLE.replace("[2, 5]", "[0, 5]"), encoding="utf-8")
    with pytest.raises(InputError, match=r"t4\.yaml: decodeMilliseconds at 16 bits, row 1"):
        latency_sources([file])
