"""Every test computes with one thread: the machine's cores belong to the processes that some tests start. None sees the user's cache.

Of several workers (`pytest -n`) each has a cache of its own, so that none finds what another has made. `laws` says what the profile means.
"""

import gc
import os
import re
import tempfile
import zlib

import pytest
from hypothesis import settings

from strata_runtime.collector import freeze_imports
from tests.cluster.testbed import tools
from tests.laws import ALL, share

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(tools.DIRECTORY_VARIABLE, str(tools.cache_dir()))
_cache = tempfile.TemporaryDirectory(prefix="strata-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # of processes that tests start, too
_whole = settings.get_profile(settings.get_current_profile_name())
settings.register_profile(ALL, _whole, deadline=None)  # no test knows what time it takes
settings.register_profile("few", _whole, deadline=None, max_examples=share(_whole.max_examples))
settings.load_profile("few")

gc.disable()  # until all is imported: half a million objects that stay, gone through again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=_part,
        help="i/n: every n-th file of tests alone, from the i-th on, in no order that anybody has made",
    )


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"{text!r} must be i/n, where i is 1 to n")
    return int(found[1]), int(found[2])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole files, for what the tests of one share is made once."""
    if (part := config.getoption("--part")) is None:
        return
    which, count = part
    kept = {item: zlib.crc32(item.nodeid.split("::")[0].encode()) % count == which - 1 for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not kept[item]])
    items[:] = [item for item in items if kept[item]]


def pytest_collection_finish() -> None:
    freeze_imports()
    gc.enable()
