"""Imported by the fork server, and there only: what every rank then has without importing it.

The server dies with its supervisor (Linux: PR_SET_PDEATHSIG), without any Python having to run.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

if os.environ.get("NBDIST_SUPERVISOR") == str(os.getppid()):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.environ["NBDIST_SUPERVISOR"] != str(os.getppid()):  # it died just before
            os._exit(1)
    for _name in os.environ.get("NBDIST_PRELOAD", "").split(","):
        if _name:
            importlib.import_module(_name)
