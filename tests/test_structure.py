"""The structure page lists every module, with what the module says of itself."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_structure_page_lists_the_modules_as_they_are() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "list-modules"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
