"""Open episodes that sleep: `python -m benchmarks.episodes` prints one JSON object.

Playing episodes keep every decode slot of a vLLM engine busy. Their throughput is measured alone,
and beside thousands of open episodes that sleep in their environment after a first turn.

- alone, beside: sampled tokens per second of the playing episodes, one window per round.
- beside_over_alone: median of the ratios of each round's windows.
- kib_per_sleeper: unshared memory that an open, sleeping episode adds: in the process of engine
  and driver, and in those of the environment.
- open_s, close_s: time to open all sleepers and sample their first turn, and to give them up.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.command import (
    ROOT,
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from benchmarks.runs import make_arithmetic
from streamrl.data.config import DataConfig
from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import EpisodeDriver, start_episode_driver
from streamrl.messages import Prompt

MODEL = ROOT / "examples" / "arithmetic" / "build" / "base_model"
ENVIRONMENT = Path(__file__).with_name("sum_questions.py")
GROUP_SIZE = 8
NUM_SLOTS = 64
MAX_TURN_TOKENS = 8
MAX_LENGTH = 128
OPEN_TIMEOUT_S = 300.0
NEVER_S = 3600.0
"""Deadline of a sleeper's turn and episode: it is given up at the end of a round instead."""


def make_parser() -> BenchmarkParser:
    """Declare the number of sleepers and the rounds."""
    parser = BenchmarkParser("episodes", __doc__)
    parser.add_argument(
        "--sleepers", type=at_least(1), default=5000, help="open, sleeping episodes"
    )
    parser.add_argument("--nap-s", type=at_least(1), default=10, help="length of a nap, s")
    parser.add_argument("--window-s", type=at_least(1), default=12, help="length of a window, s")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.set_quick(sleepers=64, window_s=2, rounds=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all rounds and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    make_arithmetic()
    os.environ.update(make_vllm_env("cuda" if has_local_gpu() else "cpu"))
    rounds = asyncio.run(measure_rounds(arguments))
    return {
        "sleepers": arguments.sleepers,
        "alone": [one.alone for one in rounds],
        "beside": [one.beside for one in rounds],
        "beside_over_alone": statistics.median(one.beside / one.alone for one in rounds),
        # Later rounds reuse memory that the first one has freed.
        "kib_per_sleeper": {
            name: size / arguments.sleepers / 1024 for name, size in rounds[0].added_bytes.items()
        },
        "open_s": statistics.median(one.open_s for one in rounds),
        "close_s": statistics.median(one.close_s for one in rounds),
    }


@dataclass(frozen=True)
class SleepRound:
    """Figures of a round. alone, beside: tokens/s. added_bytes: by driver and environment."""

    alone: float
    beside: float
    added_bytes: dict[str, int]
    open_s: float
    close_s: float


@dataclass
class TurnCounter:
    """Counts sampled turns and tokens; `record` is the compute context of a group's turns."""

    num_turns: int = 0
    num_tokens: int = 0

    @asynccontextmanager
    async def record(self, **facts: Any) -> AsyncIterator[MutableMapping[str, Any]]:
        yield facts
        self.num_turns += 1
        self.num_tokens += facts["tokens"]


async def measure_rounds(arguments: argparse.Namespace) -> list[SleepRound]:
    config = GeneratorConfig(max_new_tokens=MAX_TURN_TOKENS, max_concurrent_rollouts=NUM_SLOTS)
    engine = await GenerationEngine.start(EngineSpec(str(MODEL), config, MAX_LENGTH))
    driver = None
    try:
        await engine.use_model_dir(0)
        driver = await start_episode_driver(
            EnvironmentConfig(
                path=str(ENVIRONMENT),
                max_turns=8,
                max_tokens=MAX_LENGTH - 16,
                turn_timeout_s=NEVER_S,
                episode_timeout_s=NEVER_S,
            ),
            DataConfig(),
            config,
            engine,
            str(MODEL),
        )
        tokens = TurnCounter()
        players = [
            asyncio.create_task(play_groups(driver, tokens, number))
            for number in range(NUM_SLOTS // GROUP_SIZE)
        ]
        await measure_tokens(tokens, players, arguments.window_s)  # warm-up
        rounds = []
        for number in range(arguments.rounds):
            report_progress(f"round {number + 1} of {arguments.rounds}")
            rounds.append(await measure_round(driver, tokens, players, arguments))
        await cancel_all(players)
        return rounds
    finally:
        if driver is not None:
            await driver.close()
        await engine.close()


async def measure_round(
    driver: EpisodeDriver,
    tokens: TurnCounter,
    players: Sequence[asyncio.Task[None]],
    arguments: argparse.Namespace,
) -> SleepRound:
    alone = await measure_tokens(tokens, players, arguments.window_s)
    before = measure_memory()
    started = time.perf_counter()
    asleep = TurnCounter()
    prompt = make_prompt("sleep", nap_s=arguments.nap_s)
    sleepers = asyncio.create_task(
        driver.run_group(
            prompt,
            seeds=range(arguments.sleepers),
            environment_seed=0,
            compute=asleep.record,
        )
    )
    while asleep.num_turns < arguments.sleepers:
        if sleepers.done() or time.perf_counter() - started > OPEN_TIMEOUT_S:
            raise BenchmarkError(
                f"{asleep.num_turns} of {arguments.sleepers} episodes are open after"
                f" {time.perf_counter() - started:.0f} s"
            )
        await asyncio.sleep(0.05)
    open_s = time.perf_counter() - started
    beside = await measure_tokens(tokens, players, arguments.window_s)
    after = measure_memory()
    started = time.perf_counter()
    await cancel_all([sleepers])
    return SleepRound(
        alone,
        beside,
        {name: after[name] - before[name] for name in after},
        open_s,
        time.perf_counter() - started,
    )


async def play_groups(driver: EpisodeDriver, tokens: TurnCounter, player: int) -> None:
    """Play group after group until cancelled."""
    for number in itertools.count():
        first = number * GROUP_SIZE
        await driver.run_group(
            make_prompt(f"play-{player}-{number}"),
            seeds=range(first, first + GROUP_SIZE),
            environment_seed=number,
            compute=tokens.record,
        )


async def measure_tokens(
    tokens: TurnCounter, players: Sequence[asyncio.Task[None]], window_s: float
) -> float:
    """Return the tokens per second that the players sample in a window."""
    started, before = time.perf_counter(), tokens.num_tokens
    await asyncio.wait(players, timeout=window_s, return_when=asyncio.FIRST_COMPLETED)
    for player in players:
        if player.done():
            player.result()
    return (tokens.num_tokens - before) / (time.perf_counter() - started)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def make_prompt(uid: str, **extra_info: Any) -> Prompt:
    """Return a prompt without messages of its own: the environment asks."""
    return Prompt(uid, np.array([1], np.int32), extra_info=extra_info)


def measure_memory() -> dict[str, int]:
    """Return the unshared memory of this process, and of all that it started, bytes."""
    sizes = {"driver": 0, "environment": 0}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        name = "driver" if process.pid == os.getpid() else "environment"
        sizes[name] += process.memory_full_info().uss
    return sizes


if __name__ == "__main__":
    main()
