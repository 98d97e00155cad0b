"""Every test computes with one thread: the machine's cores belong to the processes that some tests start."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
