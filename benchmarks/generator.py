"""The generator against plain vLLM: `python -m benchmarks.generator` prints one JSON object.

Tokens per second of the same rollouts, with the same seeds, on the same small model; figures are
medians over rounds, in which the engines take turns.

generator   streamrl's engine, driven by the event loop of its actor: groups of prompts, as columns
vllm        plain vLLM in its caller's process: requests added, then steps until all have finished
vllm_apart  plain vLLM with its engine core in another process, as vLLM's server runs it

`generator_over_vllm` is what streamrl's Python costs, and `apart_over_vllm` what a process for the
engine core alone gains. `loop_us_per_token` is the processor time of the generator's event loop,
during which the engine's thread may wait for the interpreter lock.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as LateError
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil

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
from streamrl.engines.generator_config import GeneratorConfig, make_engine_args
from streamrl.engines.vllm.engine import (
    EngineSpec,
    VllmEngine,
    build_vllm_engine,
    shut_down_engine,
)
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.plain_layers import keep_plain_linears
from streamrl.messages import Prompt, make_rollout_seeds

Result = TypeVar("Result")
GROUP_SIZE = 8
PROMPT_TOKENS = 24
TIMEOUT_S = 900.0
"""For the start of an engine and all of its rounds."""


class Round(NamedTuple):
    """Tokens and seconds of a round, and processor seconds of the event loop."""

    tokens: int
    seconds: float
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
    # The engines are forked from one process that has imported vLLM.
    get_context("forkserver").set_forkserver_preload(
        ["benchmarks.generator", "vllm.v1.engine.llm_engine"]
    )
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
        rounds = _run_in_turn(spec, arguments.rounds)
    counts = {sum(round_.tokens for round_ in sampled) for sampled in rounds.values()}
    if len(counts) > 1:
        raise BenchmarkError(f"the engines sampled different numbers of tokens: {sorted(counts)}")
    num_tokens = counts.pop()
    speeds = {
        name: statistics.median(round_.tokens / round_.seconds for round_ in sampled)
        for name, sampled in rounds.items()
    }
    loop_s = sum(round_.loop_s for round_ in rounds["generator"])
    return {
        "tokens": num_tokens,
        "tokens_per_s": speeds,
        "loop_us_per_token": loop_s / num_tokens * 1e6,
        "generator_over_vllm": speeds["generator"] / speeds["vllm"],
        "apart_over_vllm": speeds["vllm_apart"] / speeds["vllm"],
    }


def _run_in_turn(spec: EngineSpec, num_rounds: int) -> dict[str, list[Round]]:
    """Return the rounds of each engine. Engines take turns, so that all see the same machine."""
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(_start_process(name, spec)) for name in ENGINES}
        rounds: dict[str, list[Round]] = {name: [] for name in ENGINES}
        for number in range(num_rounds + 1):
            report_progress(f"round {number} of {num_rounds}" if number else "warm-up")
            for name, pool in pools.items():
                rounds[name].append(_wait_for(name, pool.submit(_run_round, number)))
        for name, pool in pools.items():
            _wait_for(name, pool.submit(_close_engine))
    return {name: sampled[1:] for name, sampled in rounds.items()}


@contextlib.contextmanager
def _start_process(name: str, spec: EngineSpec) -> Iterator[ProcessPoolExecutor]:
    """Start an engine in a process of its own: vLLM allows one per process."""
    report_progress(f"starting {name}")
    pool = ProcessPoolExecutor(1, get_context("forkserver"))
    try:
        _wait_for(name, pool.submit(_start_engine, name, spec))
        yield pool
    finally:
        for process_id in list(pool._processes or ()):
            process = psutil.Process(process_id)
            for child in (*process.children(recursive=True), process):
                child.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _wait_for(name: str, future: Future[Result]) -> Result:
    try:
        return future.result(TIMEOUT_S)
    except LateError:
        raise BenchmarkError(f"{name}: not done after {TIMEOUT_S:g} s") from None


_ENGINES: list["GeneratorRunner | VllmRunner"] = []
"""The engine of this process."""


def _start_engine(name: str, spec: EngineSpec) -> None:
    _ENGINES.append(ENGINES[name](spec))


def _run_round(number: int) -> Round:
    return _ENGINES[0].run_round(number)


def _close_engine() -> None:
    _ENGINES.pop().close()


def make_prompts(num_rollouts: int, round_: int) -> list[Prompt]:
    """Return the prompts of a round, new ones, since the engine remembers prefixes."""
    rng = np.random.default_rng(round_)
    return [
        Prompt(f"{round_}:{i}:0", rng.integers(4, 64, PROMPT_TOKENS).astype(np.int32))
        for i in range(num_rollouts // GROUP_SIZE)
    ]


class GeneratorRunner:
    """streamrl's engine on an event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._loop = asyncio.Runner()
        self._engine = self._loop.run(GenerationEngine.start(spec))
        self._loop.run(self._engine.use_model_dir(0))

    def run_round(self, number: int) -> Round:
        return self._loop.run(self._run_round(number))

    async def _run_round(self, number: int) -> Round:
        prompts = make_prompts(self._spec.config.max_concurrent_rollouts, number)
        started, loop_started = time.perf_counter(), time.thread_time()
        groups = await asyncio.gather(*map(self._engine.generate_group, prompts))
        loop_s = time.thread_time() - loop_started
        seconds = time.perf_counter() - started
        return Round(sum(int(group["loss_mask"].sum()) for group in groups), seconds, loop_s)

    def close(self) -> None:
        self._loop.run(self._engine.close())
        self._loop.close()


class VllmRunner:
    """Plain vLLM; `is_apart` gives its engine core a process of its own."""

    def __init__(self, spec: EngineSpec, *, is_apart: bool = False) -> None:
        self._spec = spec
        self._engine = _start_apart(spec) if is_apart else build_vllm_engine(spec)

    def run_round(self, number: int) -> Round:
        prompts = make_prompts(self._spec.config.max_concurrent_rollouts, number)
        started = time.perf_counter()
        num_tokens = _sample_all(self._engine, self._spec, prompts)
        return Round(num_tokens, time.perf_counter() - started)

    def close(self) -> None:
        shut_down_engine(self._engine)


def _start_apart(spec: EngineSpec) -> VllmEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = not has_local_gpu()
    arguments = make_engine_args(
        spec.model_path, spec.config, seed=spec.seed, max_length=spec.max_length, on_cpu=on_cpu
    )
    # The process of the engine core is forked, and so has plain linear layers as well.
    with keep_plain_linears() if on_cpu else contextlib.nullcontext():
        return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=True)


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


ENGINES: dict[str, Callable[[EngineSpec], GeneratorRunner | VllmRunner]] = {
    "generator": GeneratorRunner,
    "vllm": VllmRunner,
    "vllm_apart": partial(VllmRunner, is_apart=True),
}


if __name__ == "__main__":
    main()
