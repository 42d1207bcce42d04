"""The house: which room may use which, how large things may be, and what is named how."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streamrl"
FILES = sorted(PACKAGE.rglob("*.py"))
RUNTIMES = ("ray", "vllm", "deepspeed", "wandb")
PURE = (
    "messages.py",
    "errors.py",
    "dataflow.py",
    "algorithms",
    "placement",
    "resharding",
    "controller",
)
LEVELS = (
    {
        "messages",
        "errors",
        "user_module",
        "settings",
        "small_file",
        "uncollected",
        "workers",
        "model_config",
    },
    {"algorithms", "dataflow", "placement", "resharding", "controller"},
    {
        "pipeline",
        "control",
        "publishing",
        "faces",
        "serving",
        "gathering",
        "step",
        "engines",
        "buffer",
        "weights",
        "rewards",
        "data",
        "telemetry",
        "evaluation",
        "lease",
        "checkpoint",
        "durable",
        "mailbox",
        "simulator",
    },
    {
        *("config", "agreement", "preflight", "planning", "placing", "slots", "calibration"),
        *("pictures", "actors"),
    },
    {"cli"},
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def level(of: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if of in rooms)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows_point_down(path: Path) -> None:
    if path.name == "__init__.py" and path.parent == PACKAGE:
        return
    for module in imports(path):
        if module.startswith("streamrl."):
            target = module.split(".")[1]
            assert level(target) <= level(room(path)), f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_actors_say_ray(path: Path) -> None:
    found = {module.split(".")[0] for module in imports(path)}
    if room(path) != "actors":
        assert "ray" not in found
        assert ".remote(" not in path.read_text()


@pytest.mark.parametrize(
    "module", ["streamrl.messages", "streamrl.dataflow", "streamrl.algorithms"]
)
def test_pure_rooms_load_no_runtime(module: str) -> None:
    code = (
        f"import sys, {module}, streamrl.placement\n"
        f"print([r for r in {RUNTIMES!r} if r in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_loops_load_no_runtime() -> None:
    code = (
        "import sys, streamrl.pipeline, streamrl.config, streamrl.evaluation\n"
        f"print([r for r in {RUNTIMES!r} if r in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_functions_and_signatures_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{name(path)}: {node.name} has {length} lines"
        if isinstance(node, ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 300, f"{name(path)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_words_and_manners(path: Path) -> None:
    text = path.read_text()
    assert text.isascii(), f"{name(path)} is not ASCII"
    assert not re.search(r"\b(old_log_?probs|behaviou?r_policy|rollout_worker)\b", text)
    parts = set(path.relative_to(PACKAGE).with_suffix("").parts)
    assert not parts & {"utils", "util", "common", "helpers", "helper", "base", "misc"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert not (node.func.id == "getattr" and len(node.args) == 3), name(path)


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=name)
def test_every_module_and_public_definition_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name(path)} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            public = not node.name.startswith("_")
            assert not public or ast.get_docstring(node), f"{name(path)}: {node.name}"
