"""Kind `code`: run the program of a completion against the row's tests in a sandbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from streamrl.errors import ConfigError, RewardError, RewardInfraError
from streamrl.files.bounded_read import parse_json
from streamrl.files.typed_settings import at_least, one_of, read_settings
from streamrl.messages import Prompt
from streamrl.rewards.interface.answers import AnswerPattern, PatternTimeoutError
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from streamrl.user_code.sandbox.program import (
    LANGUAGES,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.user_code.sandbox.remote import RemoteSandbox
from streamrl.user_code.sandbox.sandbox import Sandbox

ProgramTest = StdinTest | CallTest


class _TestFields(msgspec.Struct):
    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


def read_tests(truth: Any, *, most: int = 0) -> list[ProgramTest]:
    """Return the first `most` tests in a ground truth; 0: all. Raises RewardError.

    A ground truth is a dict, or its JSON, in one of two forms:
        {"inputs": [...], "outputs": [...]}: stdin and expected stdout of each test.
        The same with "fn_name": arguments and expected value of a function call. An input is a list
            of arguments, or text with an argument in JSON on each line; an output is a value or its
            JSON.
    """
    try:
        value = parse_json(truth) if isinstance(truth, str) else truth
        fields = msgspec.convert(value, _TestFields)
        pairs = [*zip(fields.inputs, fields.outputs, strict=True)]
        if not pairs:
            raise ValueError("no tests")
        tests: list[ProgramTest] = (
            [CallTest(fields.fn_name, _parse_arguments(i), _parse_accepted(o)) for i, o in pairs]
            if fields.fn_name
            else [StdinTest(_join_lines(i), _join_lines(o)) for i, o in pairs]
        )
    except ValueError as error:
        raise RewardError(
            f"ground_truth must be an object with as many inputs as outputs, or its JSON: {error}"
        ) from None
    return tests[: most or None]


def _join_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parse_arguments(value: Any) -> list[Any]:
    """Parse a list, text with one JSON value per line, or any other value as only argument."""
    if isinstance(value, str):
        return [parse_json(line) for line in value.split("\n") if line.strip()]
    return value if isinstance(value, list) else [value]


def _parse_accepted(value: Any) -> list[Any]:
    """Parse an expected return value; return all values that a function may return.

    Some datasets wrap the expected value in a list of length one; its element is accepted too.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return [value]
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


FENCED_CODE = r"(?s)```[\w+-]*\n(.*?)(?:```|\Z)"
"""Markdown code blocks; the last block may be unclosed."""


@dataclass
class CodeOptions(RetryOptions):
    """Options of kind code.

    language: language of the programs.
    extract: regular expression of the program: first group of the last match; without a match the
        whole completion is the program.
    score: all: 1 if every test passes, else 0; rate: fraction of tests that pass.
    most_tests: number of tests per row, from the first; 0: all.
    loose_numbers: compare words of the output as numbers: floats approximately, integers exactly.
    jails: concurrent programs per scorer; 0: one per core.
    limits: limits of a program: wall_s, cpu_s, compile_s, total_s, memory_mib, disk_mib, files,
        processes, open_files, output_kib; see docs/sandbox.md.
    languages: further languages by name: {file: ..., run: [...], compile: [...]}.
    url: server with sandbox-fusion's HTTP API, used instead of this machine.
    """

    language: str = "python"
    extract: str = FENCED_CODE
    score: Annotated[str, one_of("all", "rate")] = "all"
    most_tests: Annotated[int, at_least(0)] = 0
    loose_numbers: bool = False
    jails: Annotated[int, at_least(0)] = 0
    limits: dict[str, Any] = field(default_factory=dict)
    languages: dict[str, Any] = field(default_factory=dict)
    url: str = ""


class CodeReward(Reward):
    """Extracts the program of each completion and runs the tests of the ground truth.

    Expected outputs never enter the sandbox. A completion on which option `extract` exceeds its
    deadline has outcome TIMEOUT. `read_tests` defines the format of the ground truth.
    Raises ConfigError for invalid limits or languages.
    """

    def __init__(self, spec: RewardSpec[CodeOptions]) -> None:
        super().__init__()
        options = spec.options
        self._options = options
        self._program_pattern = AnswerPattern(options.extract, f"{spec.key}.extract")
        self._limits = read_settings(ProgramLimits, options.limits, section=f"{spec.key}.limits")
        self._languages = _select_language(options, spec.key)
        self._allow_unsafe = spec.context.sandbox.allow_unsafe
        self._runner: Sandbox | RemoteSandbox | None = None

    def validate_prompt(self, prompt: Prompt) -> None:
        self._read_tests(prompt)

    def _read_tests(self, prompt: Prompt) -> list[ProgramTest]:
        tests = read_tests(prompt.ground_truth, most=self._options.most_tests)
        language = self._options.language
        if self._languages[language].run and isinstance(tests[0], CallTest):
            raise RewardError(f"fn_name is for programs in Python, not {language}")
        return tests

    async def run_preflight(self) -> str:
        """Raise ConfigError if this machine cannot isolate programs or lacks the language."""
        if self._options.url:
            return ""
        sandbox = await self._start_sandbox(jails=1)
        await sandbox.close()
        return sandbox.user_warning

    async def start(self) -> None:
        if self._options.url:
            self._runner = RemoteSandbox(self._options.url, self._limits)
        else:
            self._runner = await self._start_sandbox(self._options.jails)

    async def _start_sandbox(self, jails: int) -> Sandbox:
        return await Sandbox.start(
            self._limits, jails=jails, languages=self._languages, allow_unsafe=self._allow_unsafe
        )

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        tests = self._read_tests(prompt)
        return await map_concurrently(
            lambda completion: self._judge_completion(completion, tests),
            completions,
            most=len(completions),
        )

    async def _judge_completion(
        self, completion: str, tests: Sequence[ProgramTest]
    ) -> RewardResult:
        """Run a program, retrying infrastructure errors, and convert its outcome to a result."""
        try:
            # In a thread: a regular expression may take up to SEARCH_TIMEOUT_S.
            source = await asyncio.to_thread(self._program_pattern.find_last, completion)
        except PatternTimeoutError as error:
            return RewardResult(0.0, RewardOutcome.TIMEOUT, detail=str(error))
        options, needs_all = self._options, self._options.score == "all"
        program = SandboxProgram(
            options.language,
            completion if source is None else source,
            tests,
            stop_early=needs_all,
            loose_numbers=options.loose_numbers,
        )
        result = await retry_infra_errors(lambda: self._run_program(program), options.attempts)
        score = float(result.outcome is RewardOutcome.PASS) if needs_all else result.pass_rate
        return RewardResult(score, result.outcome, detail=result.detail)

    async def _run_program(self, program: SandboxProgram) -> ProgramResult:
        assert self._runner is not None, "not started"
        result = await self._runner.run(program)
        if result.outcome is RewardOutcome.INFRA_ERROR:
            raise RewardInfraError(result.detail)
        return result

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()


def _select_language(options: CodeOptions, key: str) -> dict[str, LanguageSpec]:
    """Return {name: spec} of the configured language; own ones come before built-in ones."""
    specs = dict(LANGUAGES)
    for name, settings in options.languages.items():
        specs[name] = read_settings(LanguageSpec, settings, section=f"{key}.languages.{name}")
    if options.language not in specs:
        raise ConfigError(
            f"{key}.language={options.language}: must be one of {', '.join(specs)}, or be given"
            " in languages"
        )
    return {options.language: specs[options.language]}
