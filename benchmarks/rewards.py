"""What judging costs: `python -m benchmarks.rewards` prints one JSON object.

Rollouts scored per second, and latency of a group of 8, with 1, 2 and 4 workers: a Python function
in worker processes, math-verify in worker processes, GSM8K's rule (no process), and programs in the
sandbox, of which every second passes. Then what a jail costs to start, a right program with one
test again and again, and the peer: verl's prime_code on that program and test (of a wrong one its
score is an UnboundLocalError unless it is asked for a share), in an environment of its own
(`.venv-parity`, which is made if it is missing). Medians of ROUNDS rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.messages import Prompt
from streamrl.rewards import RewardConfig, RewardSet, build_rewards
from streamrl.rewards.sandbox import CallTest, Limits, Program, Sandbox

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
WORKERS = (1, 2, 4)
ROUNDS = 3
WARM_S = 1.5  # until every worker has started
FUNCTION = """def score(prompt, completion):
    return float(str(prompt.ground_truth) in completion)
"""
TESTS = json.dumps({"inputs": ["3\n4"], "outputs": ["7"], "fn_name": "add"})
#: Every second one is right.
PROGRAMS = [f"def add(a, b):\n    return a {'+-'[i % 2]} b\n" for i in range(GROUP)]
#: Runs under the parity environment's Python: programs and tests in, seconds and scores out.
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


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=1000, help="groups of a round (1000)")
    groups = parser.parse_args().groups
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "score.py"
        path.write_text(FUNCTION)
        figures = asyncio.run(measure(path, groups))
    print(json.dumps({"cores": os.cpu_count(), "group": GROUP, "groups": groups, **figures}))


async def measure(path: Path, groups: int) -> dict[str, Any]:
    """All figures, our own and the peer's."""
    function = {"path": str(path), "function": "score"}
    boxed = ["so it is \\boxed{1+x}", "\\boxed{x}"] * (GROUP // 2)
    figures: dict[str, Any] = {}
    for workers in WORKERS:
        replicas = {"replicas": workers}
        figures[f"{workers}_workers"] = {
            "function": await flow("function", function | replicas, "7", ["7"] * GROUP, groups),
            "math": await flow("symbolic", replicas, "x+1", boxed, max(groups // 10, 1)),
            "code": await flow("code", {"jails": workers}, TESTS, PROGRAMS, max(groups // 50, 1)),
        }
    figures["gsm8k"] = await flow("gsm8k", {}, "7", ["#### 7"] * GROUP, groups)
    calls = 10 * GROUP
    figures["sandbox"] = await sandbox(calls)
    peer = await asyncio.to_thread(prime_code, calls)
    if "median_s" in peer:
        ours = figures["sandbox"]["program_median_s"]
        peer["ours_over_theirs"] = ours / peer["median_s"]
    figures["prime_code"] = peer
    return figures


async def flow(
    kind: str, options: dict[str, Any], truth: str, texts: Sequence[str], groups: int
) -> dict[str, float]:
    """Many groups at once for the rate, then one after another for the latency of a group."""
    rewards = build_rewards([RewardConfig(kind, options=options)])
    await rewards.start()
    prompt = Prompt("0:0:0", np.array([1], np.int32), ground_truth=truth)
    try:
        warm_at = time.monotonic() + WARM_S
        while time.monotonic() < warm_at:
            await asyncio.gather(*(rewards.judge(prompt, texts) for _ in range(8)))
        rates = [await _rate(rewards, prompt, texts, groups) for _ in range(ROUNDS)]
        latency = []
        for _ in range(groups):
            started = time.perf_counter()
            await rewards.judge(prompt, texts)
            latency.append(time.perf_counter() - started)
    finally:
        await rewards.close()
    return {
        "rollouts_per_s": statistics.median(rates),
        "latency_p50_s": float(np.quantile(latency, 0.5)),
        "latency_p99_s": float(np.quantile(latency, 0.99)),
    }


async def _rate(rewards: RewardSet, prompt: Prompt, texts: Sequence[str], groups: int) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(rewards.judge(prompt, texts) for _ in range(groups)))
    return groups * len(texts) / (time.perf_counter() - started)


async def sandbox(calls: int) -> dict[str, float]:
    """What it costs to have one, self test included, and a trivial program after another."""
    program = Program("python", PROGRAMS[0], [CallTest("add", [3, 4], [7])])
    starts, seconds, passed = [], [], 0
    for _ in range(ROUNDS):
        started = time.perf_counter()
        jails = await Sandbox.start(Limits(), jails=1)
        await jails.run(program)
        starts.append(time.perf_counter() - started)
        for _ in range(calls // ROUNDS):
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


def prime_code(calls: int) -> dict[str, Any]:
    """verl's own code on the same programs; {"error": why not} where it cannot be had."""
    made = subprocess.run(
        ["make", ".venv-parity/installed"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if made.returncode:
        return {"error": (made.stderr.strip().splitlines() or ["make failed"])[-1]}
    ran = subprocess.run(
        [ROOT / ".venv-parity/bin/python", "-c", PEER],
        input=json.dumps([PROGRAMS[0], TESTS, calls]),
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        return {"error": (ran.stderr.strip().splitlines() or ["no result"])[-1]}
    seconds, scores = json.loads(found[-1].removeprefix("RESULT"))
    return {
        "median_s": statistics.median(seconds),
        "p99_s": float(np.quantile(seconds, 0.99)),
        "pass_rate": statistics.fmean(scores),
    }


if __name__ == "__main__":
    main()
