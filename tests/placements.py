"""Lines of the package that place a tensor on a device: listed, noted as they run, taken out.

`install` changes the code of the package as it is imported, so it comes before any such import.
"""

import ast
import importlib.machinery
import re
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "streamrl"
NOTE = "__note_placement__"
METHODS = ("to", "cuda", "cpu")
KEYWORDS = ("device", "pin_memory", "map_location")
GPU_DEVICE = "__import__('streamrl.distributed.devices', fromlist=['']).get_local_device()"
CPU_DEVICE = "__import__('torch').device('cpu')"


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
    """Lets `NOTE` choose, each time a placement runs, whether the tensor is placed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_place, place = is_placement(node), name_place(self._path, node)
        self.generic_visit(node)
        if not is_place:
            return node
        choice = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(place)], [])
        return ast.copy_location(ast.IfExp(choice, node, take_out(node)), node)


def take_out(node: ast.Call) -> ast.expr:
    """Return the call without its device: the tensor stays where it is, or is made on the CPU.

    A function that is not torch's gets another device: its own may have no default.
    """
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        kept = [arg for arg in node.args if not re.search("device|cpu", ast.unparse(arg))]
        if not kept and not node.keywords:
            return node.func.value
        return ast.copy_location(ast.Call(node.func, kept, node.keywords), node)
    is_of_torch = ast.unparse(node.func).startswith(("torch.", "_get_torch()."))
    keywords = []
    for keyword in node.keywords:
        if keyword.arg not in KEYWORDS:
            keywords.append(keyword)
        elif not is_of_torch:
            other = GPU_DEVICE if ast.unparse(keyword.value) == "cpu" else CPU_DEVICE
            keywords.append(ast.keyword(keyword.arg, ast.parse(other, mode="eval").body))
    return ast.copy_location(ast.Call(node.func, node.args, keywords), node)


class PlacementLog:
    """Placements that this process has reached, and the one that is taken out, if any."""

    def __init__(self) -> None:
        self.reached = set[str]()
        self.without = ""

    def is_placed(self, place: str) -> bool:
        self.reached.add(place)
        return place != self.without


LOG = PlacementLog()


def install() -> None:
    """Let `LOG` choose for the placements of all modules that are imported from now on."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get_changed_code(self: Any, name: str) -> Any:
        if not name.startswith("streamrl."):
            return get_code(self, name)
        path = Path(self.path)
        tree = PlacementChange(path).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    vars(__import__("builtins"))[NOTE] = LOG.is_placed
    loader.get_code = get_changed_code
