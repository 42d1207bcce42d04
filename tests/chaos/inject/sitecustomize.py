"""Python imports this at its start wherever the folder is first in PYTHONPATH: in every process.

Nothing happens unless the environment names a fault. Another sitecustomize is run all the same.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_other() -> None:
    """The sitecustomize that Python would have found without this folder."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()

if os.environ.get("STREAMRL_CHAOS"):
    import chaos_faults

    chaos_faults.install(os.environ["STREAMRL_CHAOS"])
