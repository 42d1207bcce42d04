import asyncio
import importlib
import json
from functools import partial
from types import SimpleNamespace

import pytest

from streamrl.errors import ConfigError, RewardError, RewardInfraError
from streamrl.rewards.interface.config import RewardConfig, SandboxConfig
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.kinds.code import read_tests
from streamrl.rewards.registry import build_rewards
from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.program import CallTest, ProgramResult, ProgramTestResult, StdinTest
from streamrl.user_code.sandbox.sandbox import Sandbox
from tests.rewards.judged import judge, prompt

ADD = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"}
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


async def judged(truth, *completions, **options):
    limits = {"wall_s": 2, "memory_mib": 256}
    config = RewardConfig("code", options={"limits": limits, **options})
    return await judge(config, prompt(truth), *completions)


async def test_stdin_programs_score_by_the_fraction_of_tests():
    program = "print(sum(map(int, input().split())))"
    results = await judged(SUM, program, "input(); print(3)", "print(", score="rate")
    assert results == [(1.0, "pass"), (0.5, "wrong"), (0.0, "compile_error")]
    assert await judged(SUM, "input(); print(3)", most_tests=1) == [(1.0, "pass")]


async def test_the_program_is_the_last_code_block_or_the_whole_completion():
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return 0"
    results = await judged(
        ADD,
        f"First:\n```python\n{wrong}\n```\nNo:\n```python\n{right}\n```\ndone",
        f"<answer>{right}</answer>",
        f"```py\n{right}",
        extract="(?s)```[a-z]*\\n(.*?)(?:```|\\Z)|<answer>(.*?)</answer>",
    )
    assert [score for score, _ in results] == [1.0, 0.0, 1.0]


async def test_a_slow_extract_pattern_gives_outcome_timeout():
    right = "def add(a, b): return a + b"
    results = await judged(ADD, "x" * 40 + "!", right, extract=r"((?:x|xx)+)y|(?s)\A(def.*)")
    assert results == [(0.0, "timeout"), (1.0, "pass")]


async def test_a_failing_sandbox_is_retried_and_never_scored_as_wrong(monkeypatch):
    broken = RewardOutcome.INFRA_ERROR
    verdicts = iter([broken, RewardOutcome.PASS, broken, broken])

    async def run(program):
        return ProgramResult((ProgramTestResult(next(verdicts), "no jail"),), len(program.tests))

    async def start(*_, **__):
        return SimpleNamespace(run=run, close=partial(asyncio.sleep, 0))

    monkeypatch.setattr(Sandbox, "start", start)
    reward_module = importlib.import_module("streamrl.rewards.interface.reward")
    monkeypatch.setattr(reward_module, "BACKOFF_S", 0.0)
    truth = {"inputs": [""], "outputs": [""]}
    assert await judged(truth, "", attempts=2) == [(1.0, "pass")]
    with pytest.raises(RewardInfraError, match="reward code, uid 0:4:0: no jail, tried 2 times"):
        await judged(truth, "", attempts=2)


async def test_a_user_defined_language():
    results = await judged(
        SUM,
        "read a b; echo $((a + b))",
        "echo no",
        language="sh",
        languages={"sh": {"file": "run.sh", "run": ["sh", "{dir}/run.sh"]}},
    )
    assert results == [(1.0, "pass"), (0.0, "wrong")]


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        (ADD, [CallTest("add", [1, 2], [3]), CallTest("add", [3, 4], [7])]),
        (
            {"inputs": [[[1, 2], "x"]], "outputs": [[5]], "fn_name": "f"},
            [CallTest("f", [[1, 2], "x"], [[5], 5])],
        ),
        ({"inputs": [["1", "2"]], "outputs": [["a", "b"]]}, [StdinTest("1\n2", "a\nb")]),
    ],
)
def test_tests_are_parsed_in_the_formats_of_datasets(truth, tests):
    assert read_tests(truth) == read_tests(json.dumps(truth)) == tests


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("print(1)", "Expecting value"),
        ({"inputs": ["1"]}, "missing required field `outputs`"),
        ({"inputs": ["1"], "outputs": []}, "argument 2 is shorter"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ({"inputs": ["[" * 100_000], "outputs": ["1"], "fn_name": "f"}, "nested too deeply"),
    ],
)
def test_a_ground_truth_without_tests_is_refused(truth, words):
    with pytest.raises(RewardError, match=f"^ground_truth must be an object with .*: .*{words}"):
        read_tests(truth)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"language": "cobol"}, r"rewards\[0\].language=cobol: must be one of python, cpp"),
        (
            {"limits": {"wall": 1}},
            r"rewards\[0\].limits.wall=1: unknown; the nearest key is wall_s",
        ),
        ({"extract": "("}, r"rewards\[0\].extract=\(: "),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build_rewards([RewardConfig("code", options=options)])


def test_function_calls_are_for_python():
    config = RewardConfig("code", options={"language": "bash"})
    with pytest.raises(ConfigError, match="fn_name is for programs in Python, not bash"):
        build_rewards([config]).check_prompts([prompt(ADD)])


async def test_without_isolation_the_run_is_refused_unless_allow_unsafe(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    config = [RewardConfig("code")]
    with pytest.raises(
        ConfigError,
        match=r"bwrap is not on PATH: apt install bubblewrap.*sandbox.allow_unsafe=true",
    ):
        await build_rewards(config).run_preflight()
    unsafe = build_rewards(config, RewardContext(sandbox=SandboxConfig(allow_unsafe=True)))
    (note,) = await unsafe.run_preflight()
    assert "This is no sandbox" in note
