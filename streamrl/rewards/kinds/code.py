"""Kind `code`: the program in a completion is run against the tests of its row, in a sandbox."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.errors import ConfigError, InfraError
from streamrl.files.typed_settings import read_settings
from streamrl.messages import Prompt
from streamrl.rewards.interface.extract import AnswerPattern, SlowPatternError
from streamrl.rewards.interface.reward import AttemptOptions, Given, Reward, attempt
from streamrl.rewards.interface.verdict import Judgement, Verdict
from streamrl.rewards.kinds.code_tests import read_tests
from streamrl.rewards.sandbox import LANGUAGES, Language, Limits, Outcome, Program, Sandbox

FENCED = r"(?s)```[\w+-]*\n(.*?)(?:```|\Z)"
"""The code blocks of a markdown text."""


@dataclass
class CodeOptions(AttemptOptions):
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
    extract: str = FENCED
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


class Runner(Protocol):
    """A sandbox, here or elsewhere."""

    async def run(self, program: Program) -> Outcome:
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

    def __init__(self, given: Given[CodeOptions]) -> None:
        """Raises ConfigError for limits or languages that cannot be."""
        super().__init__()
        options = given.options
        self._options = options
        self._extract = AnswerPattern(options.extract, option="extract")
        self._limits = read_settings(Limits, options.limits, section="rewards.limits")
        self._languages = _languages(options)
        self._allow_unsafe = given.around.sandbox.allow_unsafe
        self._runner: Runner | None = None

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError for a ground truth that holds no tests."""
        read_tests(prompt.ground_truth, most=self._options.most_tests)

    async def preflight(self) -> str:
        """Raise ConfigError if this machine cannot isolate a program, or lacks a language."""
        if self._options.url:
            return ""
        sandbox = await self._local(jails=1)
        await sandbox.close()
        return sandbox.note

    async def start(self) -> None:
        """Have a sandbox. Raises ConfigError like `preflight`."""
        options = self._options
        if options.url:
            from streamrl.rewards.sandbox.remote import RemoteSandbox

            self._runner = RemoteSandbox(options.url, self._limits)
        else:
            self._runner = await self._local(jails=options.jails or os.cpu_count() or 1)

    async def _local(self, *, jails: int) -> Sandbox:
        return await Sandbox.start(
            self._limits,
            jails=jails,
            languages=self._languages,
            allow_unsafe=self._allow_unsafe,
        )

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[Judgement]:
        """Each program's verdict. Raises InfraError if the sandbox cannot be had."""
        options = self._options
        tests = read_tests(prompt.ground_truth, most=options.most_tests)

        async def judge(source: str | SlowPatternError) -> Judgement:
            if isinstance(source, SlowPatternError):
                return Judgement(0.0, Verdict.TIMEOUT, detail=str(source))
            program = Program(
                options.language,
                source,
                tests,
                stop_early=options.score == "all",
                loose_numbers=options.loose_numbers,
            )
            return await self._judge(program)

        # Beside the event loop: a pattern may take its time.
        sources = await asyncio.to_thread(lambda: [*map(self._source_in, completions)])
        return await asyncio.gather(*map(judge, sources))

    def _source_in(self, completion: str) -> str | SlowPatternError:
        """The program of a completion, or why it is not found in time."""
        try:
            found = self._extract.last(completion)
        except SlowPatternError as error:
            return error
        return completion if found is None else found

    async def _judge(self, program: Program) -> Judgement:
        outcome: Outcome = await attempt(lambda: self._run(program), self._options.attempts)
        passes = outcome.verdict is Verdict.PASS
        score = float(passes) if self._options.score == "all" else outcome.pass_rate
        return Judgement(score, outcome.verdict, detail=outcome.detail)

    async def _run(self, program: Program) -> Outcome:
        assert self._runner is not None, "not started"
        outcome = await self._runner.run(program)
        if outcome.verdict is Verdict.INFRA_ERROR:
            raise InfraError(outcome.detail)
        return outcome

    async def close(self) -> None:
        """End all programs."""
        if self._runner is not None:
            await self._runner.close()


def _languages(options: CodeOptions) -> dict[str, Language]:
    """The language of the run, from the user's table or from ours."""
    table = dict(LANGUAGES)
    for name, row in options.languages.items():
        read = read_settings(_LanguageRow, row, section=f"rewards.languages.{name}")
        table[name] = Language(
            read.file, tuple(read.run), tuple(read.compile), read.limit_address_space
        )
    if options.language not in table:
        raise ConfigError(
            f"rewards.language={options.language}: must be one of {', '.join(table)}, or be given"
            " in languages"
        )
    return {options.language: table[options.language]}


@dataclass
class _LanguageRow:
    """A language as a config gives it."""

    file: str
    run: list[str]
    compile: list[str] = field(default_factory=list)
    limit_address_space: bool = True
