"""Logs of every runtime process: plain lines, or JSON when STRATA_LOG_FORMAT=json. Called once, at the edge."""

import logging
import os
import sys

from pythonjsonlogger.json import JsonFormatter


def set_up_logs() -> None:
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("STRATA_LOG_FORMAT") == "json":
        handler.setFormatter(JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("STRATA_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True)
