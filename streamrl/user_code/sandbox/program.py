"""Input and output types of a sandbox: programs, tests, limits, languages, results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError
from streamrl.user_code.reward_result import RewardOutcome

MIB = 1 << 20


@dataclass(frozen=True)
class ProgramLimits:
    """Resource limits of a program. Memory, process and disk limits cover all its processes.

    wall_s: wall time of a test, s.
    cpu_s: CPU time of a process in a test, s; rounded up.
    compile_s: wall time of compiling, s.
    total_s: wall time of compiling and all tests together, s.
    memory_mib: address space of a process, and memory of all processes together.
    disk_mib: total size of all files, and size of a file.
    files: number of files and directories.
    processes: concurrent processes and threads.
    open_files: open files of a process.
    output_kib: output of a test, separately for stdout, stderr and a function's return value.
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
                raise ConfigError(f"{key}={value}: must be above 0 and finite")


@dataclass(frozen=True)
class StdinTest:
    """A test that passes if the program reads `stdin` and writes `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """A test that passes if `function`, called with `arguments`, returns a value in `accepted`.

    All values are JSON data. Python only. If the program defines no such function, a method of
    class Solution is called.
    """

    function: str
    arguments: Sequence[Any]
    accepted: Sequence[Any]


@dataclass(frozen=True)
class SandboxProgram:
    """Untrusted source code and its tests.

    language: key of the sandbox's languages.
    stop_early: skip the tests after the first failure.
    loose_numbers: compare words of the output as numbers (see sandbox.py).
    """

    language: str
    source: str
    tests: Sequence[StdinTest | CallTest]
    stop_early: bool = True
    loose_numbers: bool = False


@dataclass(frozen=True)
class ProgramTestResult:
    """Result of a test. detail: explanation for people, such as the last line of stderr."""

    outcome: RewardOutcome
    detail: str = ""


@dataclass(frozen=True)
class ProgramResult:
    """Results of a program's tests that ran, in order; num_tests counts skipped tests too."""

    test_results: tuple[ProgramTestResult, ...]
    num_tests: int

    @property
    def outcome(self) -> RewardOutcome:
        """Outcome of the program: INFRA_ERROR if a test has it, else first failure, else PASS."""
        return self._decisive_result.outcome

    @property
    def detail(self) -> str:
        return self._decisive_result.detail

    @property
    def pass_rate(self) -> float:
        """Fraction of tests that pass; skipped tests count as failed."""
        return sum(r.outcome is RewardOutcome.PASS for r in self.test_results) / self.num_tests

    @property
    def _decisive_result(self) -> ProgramTestResult:
        failed = [
            result for result in self.test_results if result.outcome is not RewardOutcome.PASS
        ]
        infra_errors = [result for result in failed if result.outcome is RewardOutcome.INFRA_ERROR]
        return [*infra_errors, *failed, *self.test_results][0]


@dataclass(frozen=True)
class LanguageSpec:
    """Commands of a language; `{dir}` in a command stands for the program's directory.

    file: name of the source file in that directory.
    run: command of a test; empty: run in the jail driver's own Python, the fastest way.
    compile: command run once before the tests; empty: no compilation.
    limit_address_space: limit the address space of each process to `memory_mib`. False for runtimes
        that reserve far more than they use, such as node; the jail's memory is limited all the
        same.
    """

    file: str
    run: list[str] = field(default_factory=list)
    compile: list[str] = field(default_factory=list)
    limit_address_space: bool = True


#: Built-in languages; `languages` of kind code adds more (docs/sandbox.md).
LANGUAGES: Mapping[str, LanguageSpec] = {
    "python": LanguageSpec("solution.py"),
    "cpp": LanguageSpec(
        "solution.cpp",
        run=["{dir}/solution"],
        compile=["g++", "-O2", "-std=c++17", "-o", "{dir}/solution", "{dir}/solution.cpp"],
    ),
    "javascript": LanguageSpec(
        "solution.js", run=["node", "{dir}/solution.js"], limit_address_space=False
    ),
    "bash": LanguageSpec("solution.sh", run=["bash", "{dir}/solution.sh"]),
}
#: Languages that need no tools besides this interpreter.
PYTHON_ONLY: Mapping[str, LanguageSpec] = {"python": LANGUAGES["python"]}
