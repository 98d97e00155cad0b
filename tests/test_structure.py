"""The structure page lists every module, with what the module says of itself; and no module needs itself."""

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent


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
