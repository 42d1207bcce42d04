"""Handle of an object in the test's process, used like the handle of a Ray actor."""

import asyncio
from types import SimpleNamespace
from typing import Any


class FakeActor:
    """Handle whose `method.remote(...)` runs the method of an object as a task."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *values: asyncio.ensure_future(method(*values)))
