"""Imported by the fork server, and there only: what every rank then has without importing it. A module may have a
`warm`
function, called here, for what is slow the first time; it must leave no thread behind, since ranks are forked from
here.

The server dies with its supervisor (Linux: PR_SET_PDEATHSIG), without any Python having to run.
"""

from __future__ import annotations

import importlib
import os

from nbdist import system

if os.environ.get("NBDIST_SUPERVISOR") == str(os.getppid()):
    # Where this cannot be had, multiprocessing's own end of file from the supervisor ends us.
    if system.end_with_parent() and os.environ["NBDIST_SUPERVISOR"] != str(os.getppid()):  # it died just before
        os._exit(1)
    for _name in os.environ.get("NBDIST_PRELOAD", "").split(","):
        if _name:
            _warm = getattr(importlib.import_module(_name), "warm", None)
            if _warm is not None:
                _warm()
