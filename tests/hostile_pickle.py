"""An object whose unpickling has an effect, so that a test sees that nothing unpickled it."""

import os
from pathlib import Path


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)
