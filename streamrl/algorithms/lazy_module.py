"""Modules that are imported once something of them is asked for."""

import importlib
from typing import Any


class LazyModule:
    """Stands for a module in one that names its functions long before they are called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return vars(importlib.import_module(self._name))[attribute]
