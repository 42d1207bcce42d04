"""The generator against plain vLLM: `python -m benchmarks.generator` prints one JSON object.

Tokens per second of the same rollouts, with the same seeds, on the same small model; an engine
takes a process of its own, and figures are medians over rounds.

generator   streamrl's engine, driven by the event loop of its actor: groups of prompts, as columns
vllm        plain vLLM in its caller's process: requests added, then steps until all have finished
vllm_apart  plain vLLM with its engine core in another process, as vLLM's server runs it

`generator_over_vllm` is what streamrl's Python costs, and `apart_over_vllm` what a process for the
engine core alone gains. `loop_us_per_token` is the processor time of the generator's event loop,
which holds up the engine's thread: all that an engine in another process could save.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as LateError
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command import (
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from benchmarks.random_model import MAX_LENGTH, SHAPES, write_model
from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm import engine as vllm_engine
from streamrl.engines.vllm.engine import EngineSpec, VllmEngine
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.messages import Prompt, make_rollout_seeds

GROUP_SIZE = 8
PROMPT_TOKENS = 24
TIMEOUT_S = 900.0
"""For the start of an engine and all of its rounds."""


class Sampled(NamedTuple):
    """Tokens of all rounds, median seconds of a round, and processor seconds of the event loop."""

    tokens: int
    round_s: float
    loop_s: float = 0.0


def make_parser() -> BenchmarkParser:
    """Declare the model, the rollouts and the engines."""
    parser = BenchmarkParser("generator", __doc__)
    parser.add_argument("--millions", type=int, choices=SHAPES, default=1, help="parameters")
    parser.add_argument("--rollouts", type=at_least(GROUP_SIZE), default=256, help="at a time")
    parser.add_argument("--tokens", type=at_least(2), default=128, help="longest completion")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.set_quick(rollouts=16, tokens=8, rounds=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run every engine and print the figures."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.update(make_vllm_env("cuda" if has_local_gpu() else "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        config = GeneratorConfig(
            max_new_tokens=arguments.tokens, max_concurrent_rollouts=arguments.rollouts
        )
        spec = EngineSpec(
            write_model(arguments.millions, Path(folder)),
            config,
            min(MAX_LENGTH, PROMPT_TOKENS + arguments.tokens),
            group_size=GROUP_SIZE,
        )
        figures = {}
        for name, run in ENGINES.items():
            report_progress(f"{name}: {arguments.rounds} rounds")
            figures[name] = _run_apart(name, partial(run, spec, arguments.rounds))
    counts = {sampled.tokens for sampled in figures.values()}
    if len(counts) > 1:
        raise BenchmarkError(f"the engines sampled different numbers of tokens: {sorted(counts)}")
    speeds = {
        name: sampled.tokens / arguments.rounds / sampled.round_s
        for name, sampled in figures.items()
    }
    generator = figures["generator"]
    return {
        "tokens": generator.tokens,
        "tokens_per_s": speeds,
        "loop_us_per_token": generator.loop_s / generator.tokens * 1e6,
        "generator_over_vllm": speeds["generator"] / speeds["vllm"],
        "apart_over_vllm": speeds["vllm_apart"] / speeds["vllm"],
    }


def _run_apart(name: str, run: Callable[[], Sampled]) -> Sampled:
    """Return what `run` returns in a new process; vLLM allows an engine per process."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        return pool.submit(run).result(TIMEOUT_S)
    except LateError:
        raise BenchmarkError(f"{name}: not done after {TIMEOUT_S:g} s") from None
    finally:
        for process in (pool._processes or {}).values():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def make_prompts(num_rollouts: int, round_: int) -> list[Prompt]:
    """Return the prompts of a round, new ones, since the engine remembers prefixes."""
    rng = np.random.default_rng(round_)
    return [
        Prompt(f"{round_}:{i}:0", rng.integers(4, 64, PROMPT_TOKENS).astype(np.int32))
        for i in range(num_rollouts // GROUP_SIZE)
    ]


def run_generator(spec: EngineSpec, rounds: int) -> Sampled:
    return asyncio.run(_run_generator(spec, rounds))


async def _run_generator(spec: EngineSpec, rounds: int) -> Sampled:
    engine = await GenerationEngine.start(spec)
    await engine.use_model_dir(0)
    num_tokens, seconds, loop_s = 0, [], 0.0
    for round_ in range(-1, rounds):  # the first warms up
        prompts = make_prompts(spec.config.max_concurrent_rollouts, round_ + 1)
        started, loop_started = time.perf_counter(), time.thread_time()
        groups = await asyncio.gather(*map(engine.generate_group, prompts))
        if round_ >= 0:
            seconds.append(time.perf_counter() - started)
            loop_s += time.thread_time() - loop_started
            num_tokens += sum(int(columns["loss_mask"].sum()) for columns in groups)
    await engine.close()
    return Sampled(num_tokens, statistics.median(seconds), loop_s)


def run_vllm(spec: EngineSpec, rounds: int, *, apart: bool = False) -> Sampled:
    """Run plain vLLM; `apart` gives its engine core a process of its own."""
    engine = _start_apart(spec) if apart else vllm_engine.build_vllm_engine(spec)
    num_tokens, seconds = 0, []
    for round_ in range(-1, rounds):
        prompts = make_prompts(spec.config.max_concurrent_rollouts, round_ + 1)
        started = time.perf_counter()
        count = _sample_all(engine, spec, prompts)
        if round_ >= 0:
            seconds.append(time.perf_counter() - started)
            num_tokens += count
    vllm_engine.shut_down_engine(engine)
    return Sampled(num_tokens, statistics.median(seconds))


def _start_apart(spec: EngineSpec) -> VllmEngine:
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = vllm_engine._make_engine_args(spec)
    with vllm_engine._keep_plain_on_cpu():
        return LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)


def _sample_all(engine: VllmEngine, spec: EngineSpec, prompts: Sequence[Prompt]) -> int:
    """Sample all groups; return the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for prompt in prompts:
        ids = {"type": "token", "prompt_token_ids": prompt.token_ids.tolist()}
        for index, seed in enumerate(make_rollout_seeds(spec.run_seed, prompt.uid, GROUP_SIZE)):
            params = SamplingParams(
                seed=seed,
                max_tokens=spec.config.max_new_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"{prompt.uid}:{index}", ids, params)
    num_tokens = 0
    while engine.has_unfinished_requests():
        finished = [output for output in engine.step() if output.finished]
        num_tokens += sum(len(output.outputs[0].token_ids) for output in finished)
    return num_tokens


ENGINES: dict[str, Callable[[EngineSpec, int], Sampled]] = {
    "generator": run_generator,
    "vllm": run_vllm,
    "vllm_apart": partial(run_vllm, apart=True),
}


if __name__ == "__main__":
    main()
