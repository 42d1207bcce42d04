"""`streamrl evaluate`: sample a model on a file of prompts, score, and say how good it is."""

import argparse
import asyncio
import json
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streamrl.checkpoint import find_resume_point
from streamrl.config import load_config
from streamrl.data import DataConfig, load_prompts, load_tokenizer, load_vocab_size
from streamrl.engines.generation import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig, generation_env
from streamrl.errors import ConfigError
from streamrl.evaluation import EvaluationConfig, EvaluationResult, evaluate
from streamrl.messages import Columns, Prompt, Rollout
from streamrl.preflight import model_length
from streamrl.rewards import RewardConfig, build_rewards, decode_completions


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and the settings it was trained with, if it is of a run."""

    model_dir: Path
    rewards: Sequence[RewardConfig]
    max_new_tokens: int
    data: DataConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl evaluate`."""
    defaults = EvaluationConfig()
    parser.add_argument("model", type=Path, help="model directory, checkpoint or run directory")
    parser.add_argument("--data", required=True, help="parquet or JSONL file of prompts")
    parser.add_argument(
        "--samples", type=int, default=defaults.samples, help="completions per prompt, k"
    )
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="0 takes the likeliest"
    )
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling")
    parser.add_argument(
        "--pass-score", type=float, default=defaults.pass_score, help="score that passes"
    )
    parser.add_argument(
        "--config", type=Path, help="score as this recipe does: its rewards, its longest completion"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="longest completion (the run's or recipe's; 256, or half of what the model takes)",
    )
    parser.add_argument("--reward", help="kind of reward (the run's or recipe's rewards; exact)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    config = EvaluationConfig(
        samples=arguments.samples,
        temperature=arguments.temperature,
        limit=arguments.limit,
        seed=arguments.seed,
        pass_score=arguments.pass_score,
    )
    subject = _subject(arguments)
    started = time.monotonic()
    result = asyncio.run(_evaluate(subject, arguments.data, config))
    _print(result, subject, time.monotonic() - started, as_json=arguments.json)
    return 0


def _subject(arguments: argparse.Namespace) -> Subject:
    """The model itself, or the newest checkpoint of a run, or the checkpoint named."""
    path: Path = arguments.model
    recipe: Path | None = arguments.config
    if not (path / "config.json").is_file():
        if not (path / "state.json").is_file() and not (path / "checkpoints").is_dir():
            raise ConfigError(f"{path}: neither a model directory, nor a checkpoint, nor a run")
        found = find_resume_point(path)
        if found.checkpoint is None:
            raise ConfigError(f"{path}: a run without a checkpoint")
        path, recipe = found.checkpoint.model_dir, recipe or found.run_dir / "config.yaml"
    if recipe is None:
        tokens = min(256, model_length(str(path), limit=None) // 2)
        subject = Subject(path, [RewardConfig(kind="exact")], tokens, DataConfig())
    else:
        config = load_config(recipe)
        subject = Subject(path, config.rewards, config.generator.max_new_tokens, config.data)
    if arguments.reward is not None:
        subject = replace(subject, rewards=[RewardConfig(kind=arguments.reward)])
    if arguments.max_new_tokens is not None:
        subject = replace(subject, max_new_tokens=arguments.max_new_tokens)
    return subject


async def _evaluate(subject: Subject, file: str, config: EvaluationConfig) -> EvaluationResult:
    rewards = build_rewards(subject.rewards)
    model = str(subject.model_dir)
    tokenizer = load_tokenizer(model)
    limit = subject.data.prompt_limit(
        model_tokens=model_length(model, limit=None), max_new_tokens=subject.max_new_tokens
    )
    loaded = load_prompts(
        file,
        tokenizer,
        config=subject.data,
        max_prompt_tokens=limit,
        vocab_size=load_vocab_size(model),
    )
    prompts = loaded.prompts[: config.limit]
    rewards.check(prompts, place=file)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = await _engine(subject, config.seed, longest + subject.max_new_tokens)

    async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
        return await engine.generate(prompt.token_ids, seeds=seeds, temperature=config.temperature)

    async def score(prompt: Prompt, rollouts: list[Rollout]) -> Columns:
        return await rewards.score(prompt, decode_completions(tokenizer, rollouts))

    try:
        return await evaluate(prompts, generate=generate, score=score, config=config)
    finally:
        await engine.close()


async def _engine(subject: Subject, seed: int, max_length: int) -> GenerationEngine:
    """An engine that serves the model directory's own weights."""
    import torch

    threads = os.cpu_count() or 1
    # What vLLM and PyTorch say to each other while they are imported is no news to the user.
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM reads these when it is imported, which the engine does when it starts.
    os.environ.update(
        generation_env("cuda" if torch.cuda.is_available() else "cpu", threads=threads)
    )
    config = GeneratorConfig(max_new_tokens=subject.max_new_tokens, threads=threads)
    engine = await GenerationEngine.start(
        str(subject.model_dir), config, seed=seed, max_length=max_length
    )
    await engine.use_model_dir(0)
    return engine


def _print(result: EvaluationResult, subject: Subject, seconds: float, *, as_json: bool) -> None:
    model, rewards = subject.model_dir, [reward.kind for reward in subject.rewards]
    if as_json:
        facts = {"model": str(model), "rewards": rewards, "seconds": seconds}
        print(json.dumps({**facts, "unscored": result.num_unscored, **_numbers(result)}))
        return
    print(f"{model}: {result.num_prompts} prompts x {result.samples} samples in {seconds:.1f} s")
    print(f"  scored by {', '.join(rewards)}; at most {subject.max_new_tokens} new tokens")
    for name, value in _numbers(result).items():
        print(f"  {name:<12} {value:.4f}")
    if result.num_unscored:
        print(f"  {result.num_unscored} prompts more have no score: {result.problem}")
    if len(result.by_source) > 1:
        for source, part in result.by_source.items():
            print(f"  {source}: pass@1 {part.pass_at_1:.4f} over {part.num_prompts} prompts")


def _numbers(result: EvaluationResult) -> dict[str, float]:
    return {
        "pass@1": result.pass_at_1,
        f"pass@{result.samples}": result.pass_at_k,
        f"mean@{result.samples}": result.mean_at_k,
    }
