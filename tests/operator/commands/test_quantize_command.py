"""`strata quantize`: the processes that it starts, what it shows of their answers, what it refuses before it starts any."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata_operator.cli import app
from strata_operator.commands import quantize as command
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalError

TINY = Path(__file__).parents[3] / "examples" / "models" / "strata-tiny"
MADE = {
    "folder": "/models/m/strata-any",
    "calibration_tokens": 512,
    "bits": 5,
    "seed_bits": 3,
    "refitted": [3, 4, 5],
    "seconds": 4.5,
    "layers": [
        {
            "layer": 0,
            "shapes": {"q": [1024, 2048], "o": [2048, 1024]},
            "size_bytes": 1 << 22,
            "seconds": 0.0,
            "kept": True,
        },
        {
            "layer": 1,
            "shapes": {"q": [1024, 2048], "o": [2048, 1024]},
            "size_bytes": 1 << 22,
            "seconds": 4.4,
            "kept": False,
        },
    ],
}


def says(answer: object, code: int = 0) -> tuple[str, ...]:
    """A process that prints its arguments on stderr and this answer on stdout."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return (
        sys.executable,
        "-c",
        f"import sys; print(*sys.argv[1:], file=sys.stderr); print({text!r}); sys.exit({code})",
    )


def test_the_table_has_the_bytes_of_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ANY", says(MADE))
    run = CliRunner().invoke(app, ["quantize", str(TINY)])
    assert run.exit_code == 0, run.output
    lines = [line.split("│") for line in run.stdout.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    # 4,194,304 weights a layer and 3,072 rows of 2^k centroids of two bytes
    assert cells == [
        ["0", "1.5", "2.1", "2.7", "4.0", "kept"],
        ["1", "1.5", "2.1", "2.7", "4.0", "4.4"],
        ["all", "3.1", "4.2", "5.4", "8.0", "4.5"],
    ]
    assert "calibrated with 512 tokens, tables of 3 to 5 bits fitted" in " ".join(run.stdout.split())
    assert "kept in /models/m/strata-any" in run.stdout


def test_without_a_text_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ANY", says(MADE | {"calibration_tokens": 0, "refitted": []}))
    run = CliRunner().invoke(app, ["quantize", str(TINY)])
    assert "not calibrated: all weights count alike (--text FILE)" in " ".join(run.stdout.split())


def test_json_is_all_that_is_printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "ANY", says(MADE))
    run = CliRunner().invoke(
        app, ["quantize", str(TINY), "--json", "--bits", "5", "--text", "t.txt", "--no-refit", "--output", "out"]
    )
    assert json.loads(run.stdout) == MADE
    asked = capfd.readouterr().err.split()
    assert asked[0] == str(TINY)
    assert asked[-7:] == ["--bits", "5", "--text", "t.txt", "--output", "out", "--no-refit"]


def test_verify_tells_what_was_read(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    told = {"folder": "/m", "verified_layers": 3, "size_bytes": 5 << 20, "seconds": 0.25}
    monkeypatch.setattr(command, "ANY", says(told))
    run = CliRunner().invoke(app, ["quantize", str(TINY), "--verify"])
    assert "all 3 layers are right: 5.0 MiB read" in run.stdout
    assert "--verify" in capfd.readouterr().err


def test_gptq_is_a_checkpoint_of_its_own(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "GPTQ", says("/there"))
    run = CliRunner().invoke(app, ["quantize", str(TINY), "--method", "gptq", "--bits", "4", "--output", "/there"])
    assert run.exit_code == 0, run.output
    assert "kept in /there" in run.stdout
    assert "--bits 4 --output /there" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(TINY), "--method", "gptq"], "name its folder with --output DIR"),
        ([str(TINY), "--method", "gptq", "--no-refit", "--output", "x"], "leave --method gptq or this away"),
        ([str(TINY), "--method", "gptq", "--verify", "--output", "x"], "leave --method gptq away"),
        (["s3://bucket/model"], "name a folder, file://, pvc://claim/path or hf://owner/name"),
    ],
)
def test_what_cannot_be_is_refused_first(arguments: list[str], message: str) -> None:
    run = CliRunner().invoke(app, ["quantize", *arguments])
    assert isinstance(run.exception, InvalidInputError)
    assert message in str(run.exception)


@pytest.mark.parametrize(("code", "kind"), [(2, InvalidInputError), (1, LocalError)])
def test_a_refusal_and_a_crash_are_told_apart(
    code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ANY", says("", code))
    run = CliRunner().invoke(app, ["quantize", str(TINY)])
    assert isinstance(run.exception, kind)


def test_who_stops_it_is_told_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise SystemExit(130)

    monkeypatch.setattr(command.subprocess, "run", stopped)
    with pytest.raises(SystemExit):
        command.run(
            command.QuantizeOptions(str(TINY), "any-precision", None, None, 1, None, "cpu", False, False, False)
        )
    assert "stopped; the same command goes on where it stopped" in capsys.readouterr().err
