"""Modules that are imported on first attribute access."""

import importlib
from typing import Any


class LazyModule:
    """Proxy of a module that defers its import until an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return vars(importlib.import_module(self._name))[attribute]
