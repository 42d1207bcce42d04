"""Cost of scoring: `python -m benchmarks.rewards` prints one JSON object.

Rollouts per second, and latency of a group of 8, with 1, 2 and 4 workers: a Python function in
worker processes, math-verify in worker processes, GSM8K's rule (in-process), and programs in the
sandbox, half of which pass. Then the start of a jail, a correct program with one test repeatedly,
and the peer: verl's prime_code on the same program and test, in the environment that `make parity`
installs. (prime_code raises UnboundLocalError for a wrong program unless called with partial
scores.) Results are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import (
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.peers import find_parity_python, measure_peer
from streamrl.actors.transport.ray_calls import await_reply
from streamrl.messages import Prompt
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_set import RewardSet
from streamrl.user_code.sandbox.program import CallTest, ProgramLimits, SandboxProgram
from streamrl.user_code.sandbox.sandbox import Sandbox

GROUP = 8
FLOW_S, PEER_S = 600.0, 300.0
WARM_S = 1.5  # until every worker has started
FUNCTION = """def score(prompt, completion):
    return float(str(prompt.ground_truth) in completion)
"""
TESTS = json.dumps({"inputs": ["3\n4"], "outputs": ["7"], "fn_name": "add"})
#: Half of the programs are right.
PROGRAMS = [f"def add(a, b):\n    return a {'+-'[i % 2]} b\n" for i in range(GROUP)]
#: Script for the parity environment's Python: reads programs and tests, prints seconds and scores.
PEER = """
import json, sys, time
from verl.utils.reward_score.prime_code import compute_score
program, tests, calls = json.load(sys.stdin)
compute_score(program, tests)
seconds, scores = [], []
for _ in range(calls):
    started = time.perf_counter()
    scores.append(float(compute_score(program, tests)[0]))
    seconds.append(time.perf_counter() - started)
print("RESULT" + json.dumps([seconds, scores]))
"""


def make_parser() -> BenchmarkParser:
    """Declare the number of groups and workers."""
    parser = BenchmarkParser("rewards", __doc__)
    parser.add_argument("--groups", type=at_least(1), default=1000, help="groups of a round")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--workers", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.set_quick(groups=10, rounds=1, workers=[1])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure our rewards and the peer's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "score.py"
        path.write_text(FUNCTION)
        figures = asyncio.run(measure_own(path, arguments))
    calls = 10 * GROUP if arguments.rounds > 1 else GROUP
    figures["prime_code"] = peer = measure_peer(partial(measure_prime_code, calls))
    if "median_s" in peer:
        peer["ours_over_theirs"] = figures["sandbox"]["program_median_s"] / peer["median_s"]
    return {"cores": os.cpu_count(), "group": GROUP, "groups": arguments.groups, **figures}


async def measure_own(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every kind of reward, and the sandbox."""
    function = {"path": str(path), "function": "score"}
    boxed = ["so it is \\boxed{1+x}", "\\boxed{x}"] * (GROUP // 2)
    groups, rounds = arguments.groups, arguments.rounds

    async def judged(
        kind: str, options: dict[str, Any], truth: str, texts: Sequence[str], share: int = 1
    ) -> dict[str, float]:
        report_progress(f"{kind}: {options}")
        rewards = build_rewards([RewardConfig(kind, options=options)])
        work = measure_rewards(rewards, truth, texts, max(groups // share, 1), rounds)
        return await await_reply(work, f"rewards of kind {kind}", FLOW_S)

    figures: dict[str, Any] = {}
    for workers in arguments.workers:
        replicas, jails = {"replicas": workers}, {"jails": workers}
        figures[f"{workers}_workers"] = {
            "function": await judged("function", function | replicas, "7", ["7"] * GROUP),
            "math": await judged("symbolic", replicas, "x+1", boxed, 10),
            "code": await judged("code", jails, TESTS, PROGRAMS, 50),
        }
    figures["gsm8k"] = await judged("gsm8k", {}, "7", ["#### 7"] * GROUP)
    report_progress("the sandbox alone")
    figures["sandbox"] = await await_reply(
        measure_sandbox(10 * GROUP // 3, rounds), "the sandbox", FLOW_S
    )
    return figures


async def measure_rewards(
    rewards: RewardSet, truth: str, texts: Sequence[str], groups: int, rounds: int
) -> dict[str, float]:
    """Score many groups at once for the rate, then one after another for the latency of a group."""
    await rewards.start()
    prompt = Prompt("0:0:0", np.array([1], np.int32), ground_truth=truth)
    try:
        warm_at = time.monotonic() + WARM_S
        while time.monotonic() < warm_at:
            await asyncio.gather(*(rewards.judge_texts(prompt, texts) for _ in range(8)))
        rates = [await _measure_rate(rewards, prompt, texts, groups) for _ in range(rounds)]
        latency = []
        for _ in range(groups):
            started = time.perf_counter()
            await rewards.judge_texts(prompt, texts)
            latency.append(time.perf_counter() - started)
    finally:
        await rewards.close()
    return {
        "rollouts_per_s": statistics.median(rates),
        "latency_p50_s": float(np.quantile(latency, 0.5)),
        "latency_p99_s": float(np.quantile(latency, 0.99)),
    }


async def _measure_rate(
    rewards: RewardSet, prompt: Prompt, texts: Sequence[str], groups: int
) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(rewards.judge_texts(prompt, texts) for _ in range(groups)))
    return groups * len(texts) / (time.perf_counter() - started)


async def measure_sandbox(calls: int, rounds: int) -> dict[str, float]:
    """Measure the start of a jail with its self test, then a trivial program repeatedly."""
    program = SandboxProgram("python", PROGRAMS[0], [CallTest("add", [3, 4], [7])])
    starts, seconds, passed = [], [], 0
    for _ in range(rounds):
        started = time.perf_counter()
        jails = await Sandbox.start(ProgramLimits(), jails=1)
        await jails.run(program)
        starts.append(time.perf_counter() - started)
        for _ in range(calls):
            started = time.perf_counter()
            outcome = await jails.run(program)
            seconds.append(time.perf_counter() - started)
            passed += outcome.pass_rate == 1.0
        await jails.close()
    return {
        "start_s": statistics.median(starts),
        "program_median_s": statistics.median(seconds),
        "program_p99_s": float(np.quantile(seconds, 0.99)),
        "pass_rate": passed / len(seconds),
    }


def measure_prime_code(calls: int) -> dict[str, float]:
    """Measure verl's scorer on the same program. Raises BenchmarkError."""
    words = [str(find_parity_python()), "-c", PEER]
    told = json.dumps([PROGRAMS[0], TESTS, calls])
    printed = run_command(words, "verl's prime_code", timeout_s=PEER_S, stdin=told)
    result_lines = [line for line in printed.splitlines() if line.startswith("RESULT")]
    if not result_lines:
        raise BenchmarkError("verl's prime_code: printed no result")
    seconds, scores = json.loads(result_lines[-1].removeprefix("RESULT"))
    return {
        "median_s": statistics.median(seconds),
        "p99_s": float(np.quantile(seconds, 0.99)),
        "pass_rate": statistics.fmean(scores),
    }


if __name__ == "__main__":
    main()
