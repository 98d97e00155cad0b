"""Every test computes with one thread: the machine's cores belong to the processes that some tests start. None sees the user's cache.

Of several workers (`pytest -n`) each has a cache of its own, so that none finds what another has made. `laws` says what the profile means.
"""

import gc
import os
import tempfile

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


def pytest_collection_finish() -> None:
    freeze_imports()
    gc.enable()
