"""Kind `code`: the program in a completion is run against the tests of its row, in a sandbox."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.errors import ConfigError, RewardInfraError
from streamrl.files.typed_settings import read_settings
from streamrl.messages import Prompt
from streamrl.rewards.interface.extract import AnswerPattern, PatternTimeoutError
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult
from streamrl.rewards.kinds.code_tests import read_tests
from streamrl.rewards.sandbox import (
    LANGUAGES,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    Sandbox,
    SandboxProgram,
)

FENCED_CODE = r"(?s)```[\w+-]*\n(.*?)(?:```|\Z)"
"""The code blocks of a markdown text."""


@dataclass
class CodeOptions(RetryOptions):
    """Options of kind code.

    language: of the programs.
    extract: where the program stands in the completion, its last match, first group; what has no
        match is a program as a whole.
    score: all: 1 if every test passes, else 0; rate: the share of tests that pass.
    most_tests: only so many of a row's tests, the first; 0: all.
    loose_numbers: compare words of a text as numbers: a float that is wanted nearly, a whole
        number exactly.
    jails: programs at once in each scorer; 0: one for each core.
    limits: of a program: wall_s, cpu_s, compile_s, total_s, memory_mib, disk_mib, files, processes,
        open_files, output_kib; see docs/sandbox.md.
    languages: more languages, by name: {file: ..., run: [...], compile: [...]}.
    url: a server that speaks sandbox-fusion's HTTP, instead of this machine.
    """

    language: str = "python"
    extract: str = FENCED_CODE
    score: str = "all"
    most_tests: int = 0
    loose_numbers: bool = False
    jails: int = 0
    limits: dict[str, Any] = field(default_factory=dict)
    languages: dict[str, Any] = field(default_factory=dict)
    url: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in ("all", "rate"):
            raise ConfigError(f"score={self.score}: must be all or rate")
        for key in ("most_tests", "jails"):
            if vars(self)[key] < 0:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 0 or more")


class ProgramRunner(Protocol):
    """A sandbox, here or elsewhere."""

    async def run(self, program: SandboxProgram) -> ProgramResult:
        """Run the tests of a program and judge them. Raises InfraError if it cannot be asked."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


class CodeReward(Reward):
    """Takes the program out of each completion and runs it. No expected value enters the sandbox.

    Where `extract` takes too long to find the program, the completion is judged timeout.
    The ground truth is what code_tests.py reads.
    """

    def __init__(self, given: RewardSpec[CodeOptions]) -> None:
        """Raises ConfigError for limits or languages that cannot be."""
        super().__init__()
        options = given.options
        self._options = options
        self._program_pattern = AnswerPattern(options.extract, option="extract")
        self._limits = read_settings(ProgramLimits, options.limits, section="rewards.limits")
        self._languages = _select_language(options)
        self._allow_unsafe = given.context.sandbox.allow_unsafe
        self._runner: ProgramRunner | None = None

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError for a ground truth that holds no tests."""
        read_tests(prompt.ground_truth, most=self._options.most_tests)

    async def run_preflight(self) -> str:
        """Raise ConfigError if this machine cannot isolate a program, or lacks a language."""
        if self._options.url:
            return ""
        sandbox = await self._start_local_sandbox(jails=1)
        await sandbox.close()
        return sandbox.user_warning

    async def start(self) -> None:
        """Have a sandbox. Raises ConfigError like `run_preflight`."""
        options = self._options
        if options.url:
            from streamrl.rewards.sandbox.remote import RemoteSandbox

            self._runner = RemoteSandbox(options.url, self._limits)
        else:
            self._runner = await self._start_local_sandbox(
                jails=options.jails or os.cpu_count() or 1
            )

    async def _start_local_sandbox(self, *, jails: int) -> Sandbox:
        return await Sandbox.start(
            self._limits,
            jails=jails,
            languages=self._languages,
            allow_unsafe=self._allow_unsafe,
        )

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """Each program's verdict. Raises InfraError if the sandbox cannot be had."""
        options = self._options
        tests = read_tests(prompt.ground_truth, most=options.most_tests)

        async def judge(source: str | PatternTimeoutError) -> RewardResult:
            if isinstance(source, PatternTimeoutError):
                return RewardResult(0.0, RewardOutcome.TIMEOUT, detail=str(source))
            program = SandboxProgram(
                options.language,
                source,
                tests,
                stop_early=options.score == "all",
                loose_numbers=options.loose_numbers,
            )
            return await self._judge_program(program)

        # Beside the event loop: a pattern may take its time.
        sources = await asyncio.to_thread(lambda: [*map(self._extract_source, completions)])
        return await asyncio.gather(*map(judge, sources))

    def _extract_source(self, completion: str) -> str | PatternTimeoutError:
        """The program of a completion, or why it is not found in time."""
        try:
            found = self._program_pattern.find_last(completion)
        except PatternTimeoutError as error:
            return error
        return completion if found is None else found

    async def _judge_program(self, program: SandboxProgram) -> RewardResult:
        outcome: ProgramResult = await retry_infra_errors(
            lambda: self._run_program(program), self._options.attempts
        )
        passes = outcome.outcome is RewardOutcome.PASS
        score = float(passes) if self._options.score == "all" else outcome.pass_rate
        return RewardResult(score, outcome.outcome, detail=outcome.detail)

    async def _run_program(self, program: SandboxProgram) -> ProgramResult:
        assert self._runner is not None, "not started"
        outcome = await self._runner.run(program)
        if outcome.outcome is RewardOutcome.INFRA_ERROR:
            raise RewardInfraError(outcome.detail)
        return outcome

    async def close(self) -> None:
        """End all programs."""
        if self._runner is not None:
            await self._runner.close()


def _select_language(options: CodeOptions) -> dict[str, LanguageSpec]:
    """The language of the run, from the user's table or from ours."""
    table = dict(LANGUAGES)
    for name, row in options.languages.items():
        read = read_settings(_LanguageEntry, row, section=f"rewards.languages.{name}")
        table[name] = LanguageSpec(
            read.file, tuple(read.run), tuple(read.compile), read.limit_address_space
        )
    if options.language not in table:
        raise ConfigError(
            f"rewards.language={options.language}: must be one of {', '.join(table)}, or be given"
            " in languages"
        )
    return {options.language: table[options.language]}


@dataclass
class _LanguageEntry:
    """A language as a config gives it."""

    file: str
    run: list[str]
    compile: list[str] = field(default_factory=list)
    limit_address_space: bool = True
