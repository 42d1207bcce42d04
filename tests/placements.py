"""Lines of the package that place a tensor on a device: listed, noted as they run, taken out.

`install` changes the code of the package as it is imported, so it comes before any such import.
"""

import ast
import importlib.machinery
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "streamrl"
NOTE = "__note_placement__"
METHODS = ("to", "cuda", "cpu")
KEYWORDS = ("device", "pin_memory", "map_location")


def is_placement(node: ast.AST) -> bool:
    """Return whether an expression puts a tensor on a device: `.to`, `.cpu`, `device=` and such.

    Not those that change the dtype only, or make tensors without values.
    """
    if not isinstance(node, ast.Call):
        return False
    text = [ast.unparse(argument) for argument in node.args]
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        return node.func.attr != "to" or not all("dtype" in argument for argument in text)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return any(keywords.get(name, "'meta'") != "'meta'" for name in KEYWORDS)


@cache
def list_placements() -> dict[str, str]:
    """Return the text of each placement by its place, as `engines/training/tasks.py:56:12`."""
    placements = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if is_placement(node):
                placements[name_place(path, node)] = ast.unparse(node)
    return placements


def name_place(path: Path, node: Any) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}:{node.end_col_offset}"


class PlacementChange(ast.NodeTransformer):
    """Notes each placement as it runs, and takes out the one at a place."""

    def __init__(self, path: Path, without: str) -> None:
        self._path, self._without = path, without

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_place, place = is_placement(node), name_place(self._path, node)
        self.generic_visit(node)
        if not is_place:
            return node
        changed: ast.expr = take_out(node) if place == self._without else node
        note = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(place), changed], [])
        return ast.copy_location(note, node)


def take_out(node: ast.Call) -> ast.expr:
    """Return the call without its device: the tensor stays where it is, or is made on the CPU."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
        keywords = [keyword for keyword in node.keywords if keyword.arg not in KEYWORDS]
        return ast.copy_location(ast.Call(node.func, node.args, keywords), node)
    kept = [argument for argument in node.args if "dtype" in ast.unparse(argument)]
    return ast.copy_location(ast.Call(node.func, kept, []), node) if kept else node.func.value


def install(note: Callable[[str], None], *, without: str = "") -> None:
    """Call `note` with the place of each placement that runs; take out that at `without`."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get_changed_code(self: Any, name: str) -> Any:
        if not name.startswith("streamrl."):
            return get_code(self, name)
        path = Path(self.path)
        tree = PlacementChange(path, without).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def note_and_return(place: str, value: Any) -> Any:
        note(place)
        return value

    vars(__import__("builtins"))[NOTE] = note_and_return
    loader.get_code = get_changed_code
