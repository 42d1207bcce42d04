"""Layering of the package: import direction, naming rules."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streamrl"
RUNTIMES = ("ray", "vllm", "deepspeed", "wandb")
PURE = (
    *("streamrl.messages", "streamrl.dataflow", "streamrl.algorithms", "streamrl.placement"),
    *("streamrl.pipeline", "streamrl.config.run_config", "streamrl.stream.evaluation"),
)
NAMES_OF_NOTHING = {"utils", "util", "common", "helpers", "helper", "base", "misc"}
ROOMS = (
    "errors",
    *("messages", "files", "distributed"),
    *("user_code", "resharding", "dataflow"),
    *("weights", "telemetry", "placement", "data", "buffer", "algorithms"),
    *("engines", "run_dir"),
    "stream",
    *("rewards", "pipeline"),
    "environments",
    "config",
    *("actors", "own_loops"),
    "planner",
    "cli",
)
"""Each room imports those before it only, so that the command line alone knows the planner."""


def is_own_module(name: str) -> bool:
    """Return whether this is the dotted name of a module or package of streamrl."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def find_imports(path: Path, tree: ast.Module) -> tuple[tuple[str, int], ...]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    imports: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            submodules = (f"{module}.{alias.name}" for alias in node.names)
            names = [name for name in submodules if is_own_module(name)] or [module]
            imports += ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            constants = (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
            imports += ((str(value), node.lineno) for value in constants)
    return tuple(imports)


class Source(NamedTuple):
    """A file of the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """The imported modules with their lines, also those of import_module("name")."""
        return find_imports(self.path, self.tree)

    def find_lines(self, pattern: re.Pattern[str]) -> Iterator[str]:
        for number, line in enumerate(self.text.split("\n"), start=1):
            if pattern.search(line):
                yield self.say(number, line.strip())

    def say(self, line: int, message: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}: {message}"


@cache
def load_sources() -> tuple[Source, ...]:
    sources = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        sources.append(Source(path, text, ast.parse(text)))
    return tuple(sources)


@pytest.fixture(scope="module", autouse=True)
def _forget_sources() -> Iterator[None]:
    """Free the syntax trees, which are a million objects."""
    yield
    load_sources.cache_clear()
    find_imports.cache_clear()


def reject(offenders: Iterable[str]) -> None:
    """Fail with all offenders: without -v pytest shows only the first item of a list."""
    offending_lines = list(offenders)
    assert not offending_lines, "\n".join(["", *offending_lines])


@pytest.mark.parametrize(
    "statement",
    [
        "import streamrl.planner",
        "from streamrl import planner",
        "from ..planner import plan_report",
        "from streamrl.planner.plan_report import PlanReport",
        "importlib.import_module('streamrl.planner.plan_report')",
    ],
)
def test_each_way_to_import_is_seen(statement: str):
    source = Source(PACKAGE / "data" / "rows.py", statement, ast.parse(statement))
    ((module, line),) = source.imports
    assert (module.split(".")[:2], line) == (["streamrl", "planner"], 1)


def find_level(room: str) -> int:
    return ROOMS.index(room)


def test_rooms_import_downwards_only():
    reject(
        source.say(line, f"imports {module}")
        for source in load_sources()
        if source.path != PACKAGE / "__init__.py"
        for module, line in source.imports
        if module.startswith("streamrl.")
        and find_level(module.split(".")[1]) > find_level(source.room)
    )


def list_room_imports(room: Path) -> dict[str, set[str]]:
    """Return the imports between parts of a room: its folders, and its loose files as one part."""

    def find_part(path: Path) -> str:
        part = path.relative_to(room).parts[0]
        return part if (room / part).is_dir() else "loose files"

    imports: dict[str, set[str]] = defaultdict(set)
    for source in load_sources():
        if room in source.path.parents:
            for module, _ in source.imports:
                path = ROOT.joinpath(*module.split("."))
                if room == path:
                    imports[find_part(source.path)].add("loose files")
                elif room in path.parents:
                    imports[find_part(source.path)].add(find_part(path))
    return {part: imported - {part} for part, imported in imports.items()}


def test_parts_of_a_room_do_not_import_each_other_in_a_circle():
    for room in sorted({parent for s in load_sources() for parent in s.path.parents}):
        if PACKAGE in room.parents:
            try:
                TopologicalSorter(list_room_imports(room)).prepare()
            except CycleError as error:
                reject([f"{room.relative_to(ROOT)}: {' <- '.join(error.args[1])}"])


def test_modules_do_not_import_each_other_in_a_circle():
    imports = {}
    for source in load_sources():
        module = ".".join(source.path.relative_to(ROOT).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        # Late imports and those for types count, too.
        imports[module] = {imported for imported, _ in source.imports} - {module}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        reject([" <- ".join(error.args[1])])


def test_only_actors_and_own_loops_import_ray():
    reject(
        source.say(line, f"imports {module}")
        for source in load_sources()
        if source.room not in ("actors", "own_loops")
        for module, line in source.imports
        if module.split(".")[0] == "ray"
    )


def test_pure_rooms_and_the_pipeline_load_no_runtime():
    code = (
        "import importlib, sys\n"
        f"for module in {PURE!r}:\n"
        "    importlib.import_module(module)\n"
        f"    [print(f'{{module}}:{{r}}') for r in {RUNTIMES!r} if r in sys.modules]"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    reject(process.stdout.split())


ASKS_FOR_GPUS = (
    r"torch\.(cuda|accelerator|mps|xpu)\b|\bget_device_module\b|\.cuda\(|device\(.cuda"
    r"|current_platform\.is_"
)


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (r"\.remote\(", ("actors/", "own_loops/")),
        # The first answers everyone else; vLLM finds its device by itself, which the second checks.
        (ASKS_FOR_GPUS, ("distributed/devices.py", "engines/vllm/engine.py")),
        (r"[^\x00-\x7f]", ()),
    ],
    ids=["remote calls", "questions about GPUs", "letters beyond ASCII"],
)
def test_only_some_files_have(pattern: str, allowed: tuple[str, ...]):
    reject(
        line
        for source in load_sources()
        if not str(source.path.relative_to(PACKAGE)).startswith(allowed)
        for line in source.find_lines(re.compile(pattern))
    )


def test_no_file_or_folder_has_a_generic_name():
    reject(
        source.say(1, "has a generic name")
        for source in load_sources()
        if NAMES_OF_NOTHING & set(source.path.relative_to(PACKAGE).with_suffix("").parts)
    )


def test_getattr_has_no_default():
    reject(
        source.say(node.lineno, ast.unparse(node))
        for source in load_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "getattr" and len(node.args) == 3)
    )


def test_every_module_has_a_docstring():
    reject(
        source.say(1, "the module has no docstring")
        for source in load_sources()
        if source.path.name != "__init__.py" and not ast.get_docstring(source.tree)
    )


def test_class_names_are_unique_in_the_package():
    definitions: dict[str, list[str]] = {}
    for source in load_sources():
        for node in ast.walk(source.tree):
            # Settings nested in their reader are all named Config.
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                definitions.setdefault(node.name, []).append(source.say(node.lineno, node.name))
    reject(line for lines in definitions.values() if len(lines) > 1 for line in lines)
