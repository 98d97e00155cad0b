"""The structure page lists every module, with what the module says of itself; no module needs itself; and documents are no wider than people read."""

import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_COLUMNS = 140


def test_the_structure_page_lists_the_modules_as_they_are() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "list-modules"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("package", ["strata_planner", "strata_runtime", "strata_operator"])
def test_no_imports_go_in_a_circle(package: str) -> None:
    """Of modules, not of packages; imports inside functions count."""
    graph = grimp.build_graph(package, cache_dir=None)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(needs).prepare()  # a CycleError names the circle


def test_documents_have_lines_that_fit() -> None:
    """Prose alone: tables, code and pictures are as wide as they are."""
    long = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sorted((*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
        for number, line in prose(file.read_text(encoding="utf-8"))
        if len(line) > MOST_COLUMNS
    ]
    assert not long, f"longer than {MOST_COLUMNS} characters: {', '.join(long)}"


def prose(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith(("|", "![")):
            yield number, line
