"""Every test computes with one thread: the machine's cores belong to the processes that some tests start. None sees the user's cache.

Of several workers (`pytest -n`) each has a cache of its own, so that none finds what another has made. `laws` says what the profile means.
"""

import os
import tempfile

from hypothesis import settings

from tests.cluster.testbed import tools
from tests.laws import ALL

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(tools.DIRECTORY_VARIABLE, str(tools.cache_dir()))
_cache = tempfile.TemporaryDirectory(prefix="strata-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # of processes that tests start, too
settings.register_profile(ALL, settings.get_profile(settings.get_current_profile_name()))
