"""Startup hook that Python imports in every process with this folder first in PYTHONPATH.

Install the fault that STREAMRL_CHAOS describes, if set. Run the sitecustomize that this file hides.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that Python finds without this folder."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden_sitecustomize()

if os.environ.get("STREAMRL_CHAOS"):
    import chaos_faults

    chaos_faults.install(os.environ["STREAMRL_CHAOS"])
