"""Mutants: faults put into the package on purpose, each with the test that must fail for it.

    python -m tests.mutants [--only TEXT] [--check]

runs, in a copy of the working tree, each mutant's test without the fault (it must pass) and with it
(it must fail). Prints a line per mutant; exits with 1 if a mutant survives. `--check` only compares
the texts with the sources, as the quick tests do.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A fault: `new` in place of `old`, which occurs once in `file` of the package."""

    file: str
    old: str
    new: str
    test: str
    """Arguments of pytest, such as a node id below tests/."""


MUTANTS: tuple[Mutant, ...] = (
    # algorithms
    Mutant(
        "algorithms/math/kl.py",
        "return _ratio_minus_one(-x) + x",
        "return (-x).exp() - 1 + x",
        "tests/algorithms/math/test_kl.py",
    ),
    # buffer
    # stream
    # weights
    # engines
    # resharding
    # actors
    # run_dir, config, cli
    # user_code, rewards
    # environments
    # data, telemetry
    # planner, placement
)


def find_stale(mutants: tuple[Mutant, ...]) -> Iterator[str]:
    """Yield a line per mutant whose text is not in its file exactly once."""
    for mutant in mutants:
        source = ROOT / "streamrl" / mutant.file
        count = source.read_text().count(mutant.old) if source.is_file() else 0
        if count != 1:
            yield f"{mutant.file}: {count} times {mutant.old!r}"


def copy_tree(target: Path) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def passes(tree: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
    return not subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode


def survives(tree: Path, mutant: Mutant) -> bool:
    file = tree / "streamrl" / mutant.file
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return passes(tree, mutant.test)
    finally:
        file.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mutants with this text in file or test")
    parser.add_argument("--check", action="store_true", help="compare texts, run nothing")
    arguments = parser.parse_args()
    stale = list(find_stale(MUTANTS))
    print(*stale, sep="\n", end="\n" if stale else "")
    if arguments.check or stale:
        return bool(stale)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutant in MUTANTS:
            if arguments.only in f"{mutant.file} {mutant.test}":
                if not passes(tree, mutant.test):
                    verdict = "FAILS WITHOUT"
                else:
                    verdict = "SURVIVES" if survives(tree, mutant) else "caught"
                survivors += verdict != "caught"
                print(f"{verdict}: {mutant.file}: {mutant.test}", flush=True)
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
