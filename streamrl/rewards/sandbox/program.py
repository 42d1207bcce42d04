"""What a sandbox is given to run, within which limits, and what it says of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.errors import ConfigError
from streamrl.rewards.interface.verdict import RewardOutcome

MIB = 1 << 20


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use. A memory, process or disk limit holds for all its processes.

    wall_s: of one test, s.
    cpu_s: of one process in one test, s; rounded up.
    compile_s: of compiling, s.
    total_s: of all tests and compiling together, s.
    memory_mib: of one process's address space, and of what all of them hold together.
    disk_mib: of all files it writes; of one as well.
    files: how many files and directories.
    processes: processes and threads at once.
    open_files: of one process.
    output_kib: of what one test writes to stdout, and to stderr, and of a function's value.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    compile_s: float = 20.0
    total_s: float = 60.0
    memory_mib: int = 1024
    disk_mib: int = 64
    files: int = 4096
    processes: int = 64
    open_files: int = 64
    output_kib: int = 4096

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"sandbox.{key}={value}: must be above 0 and finite")


@dataclass(frozen=True)
class StdinTest:
    """The program reads `stdin` and must write `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """`function` called with `arguments` must return one of `accepted`. All are plain JSON data.

    For Python only. A method of a class Solution is found where there is no such function.
    """

    function: str
    arguments: Sequence[Any]
    accepted: Sequence[Any]


@dataclass(frozen=True)
class SandboxProgram:
    """Source code that nobody vouches for, and its tests.

    language: a name from the table of languages.
    stop_early: leave out the tests after the first that does not pass.
    loose_numbers: compare words of a text as numbers (see compare.py).
    """

    language: str
    source: str
    tests: Sequence[StdinTest | CallTest]
    stop_early: bool = True
    loose_numbers: bool = False


@dataclass(frozen=True)
class ProgramTestResult:
    """One test: how it ended, after how many seconds, and what a person should know besides."""

    outcome: RewardOutcome
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class ProgramResult:
    """A program: the tests that were run, in order, of the `num_tests` that it has."""

    test_results: tuple[ProgramTestResult, ...]
    num_tests: int

    @property
    def outcome(self) -> RewardOutcome:
        """An infra_error if there is one, else the first that is no pass; a pass if all are."""
        return self._decisive_result.outcome

    @property
    def detail(self) -> str:
        """What is said of the test that the verdict is of."""
        return self._decisive_result.detail

    @property
    def seconds(self) -> float:
        """Of all tests that were run."""
        return sum(result.seconds for result in self.test_results)

    @property
    def pass_rate(self) -> float:
        """Share of the tests that pass; one that was not run does not."""
        return sum(r.outcome is RewardOutcome.PASS for r in self.test_results) / self.num_tests

    @property
    def _decisive_result(self) -> ProgramTestResult:
        failed = [
            result for result in self.test_results if result.outcome is not RewardOutcome.PASS
        ]
        unknown = [result for result in failed if result.outcome is RewardOutcome.INFRA_ERROR]
        return [*unknown, *failed, *self.test_results][0]


@dataclass(frozen=True)
class LanguageSpec:
    """How programs of a language are run.

    file: what the source is called, in the directory that `{dir}` stands for in a command.
    run: the command of a test; empty: in the jail's own Python, which is the quickest.
    compile: what is run once before the tests; empty: nothing.
    limit_address_space: whether a process may be held to memory_mib of addresses. A runtime that
        reserves far more than it uses must not be; it is held to what it uses, like any other.
    """

    file: str
    run: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    limit_address_space: bool = True


#: The languages that need no settings. Another is one more row: see docs/sandbox.md.
LANGUAGES: Mapping[str, LanguageSpec] = {
    "python": LanguageSpec("solution.py"),
    "cpp": LanguageSpec(
        "solution.cpp",
        run=("{dir}/solution",),
        compile=("g++", "-O2", "-std=c++17", "-o", "{dir}/solution", "{dir}/solution.cpp"),
    ),
    "javascript": LanguageSpec(
        "solution.js", run=("node", "{dir}/solution.js"), limit_address_space=False
    ),
    "bash": LanguageSpec("solution.sh", run=("bash", "{dir}/solution.sh")),
}
#: What every machine can run.
PYTHON_ONLY: Mapping[str, LanguageSpec] = {"python": LANGUAGES["python"]}
