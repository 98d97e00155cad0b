"""Every test computes with one thread: the machine's cores belong to the processes that some tests start. None sees the user's cache."""

import os
import tempfile

from tests.cluster.testbed import tools

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(tools.DIRECTORY_VARIABLE, str(tools.cache_dir()))
_cache = tempfile.TemporaryDirectory(prefix="strata-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # of processes that tests start, too
