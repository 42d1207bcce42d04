"""`streamrl evaluate`: sample a model on files of prompts, score, and say how good it is."""

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.arguments.arg_types import named, named_path
from streamrl.cli.data import add_file_arguments, named_files
from streamrl.config import load_config
from streamrl.data import (
    DataConfig,
    DataFile,
    Limits,
    load_prompts,
    load_tokenizer,
    load_vocab_size,
)
from streamrl.data.files import check_evaluated
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import generation_env
from streamrl.errors import ConfigError
from streamrl.evaluation import EvaluationConfig, EvaluationResult, evaluate
from streamrl.evaluation.metrics import Interval
from streamrl.files.hf_config import model_length, trusted_env
from streamrl.messages import Columns, Prompt, Rollout
from streamrl.rewards import RewardConfig, Surroundings, build_rewards, decode_completions
from streamrl.rewards.scorer import answer_hashes
from streamrl.run_dir.checkpoint import find_resume_point

if TYPE_CHECKING:
    from streamrl.engines.generation.generator import GenerationEngine


SAMPLING: Mapping[str, tuple[type, str]] = {
    "samples": (int, "completions per prompt, k"),
    "temperature": (float, "0 takes the likeliest"),
    "top_p": (float, "the likeliest, of this probability"),
    "top_k": (int, "0 takes all tokens"),
    "limit": (int, "only the first so many prompts"),
    "seed": (int, "seed of sampling"),
    "pass_score": (float, "score that passes"),
}
"""Settings of evaluation that the command line may change: what they are, and the help."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and the settings it was trained with, if it is of a run."""

    model_dir: Path
    rewards: Sequence[RewardConfig]
    generator: GeneratorConfig
    data: DataConfig
    around: Surroundings
    evaluation: EvaluationConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl evaluate`."""
    parser.add_argument(
        "model", type=named_path, help="model directory, checkpoint or run directory"
    )
    parser.add_argument(
        "--data",
        type=named,
        action="append",
        default=[],
        metavar="FILE",
        help="file of prompts; may be given several times (the run's or recipe's data.eval)",
    )
    add_file_arguments(parser)
    sampling = parser.add_argument_group(
        "sampling", "unless given, the evaluation.* of the run or recipe, or their defaults"
    )
    for name, (kind, said) in SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, help=said)
    parser.add_argument(
        "--config",
        type=named_path,
        help="evaluate as this recipe does: its rewards, longest completion and evaluation.*",
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
    subject = _subject(arguments)
    config = choose_sampling(arguments, subject.evaluation)
    named = named_files(arguments, arguments.data, subject.data)
    # There is no place for a name of theirs, and two folders may both have a test.parquet.
    files = tuple(replace(file, name=file.path) for file in named) or subject.data.eval_files
    if not files:
        raise ConfigError("evaluate: --data names a file of prompts, or a recipe's data.eval does")
    check_evaluated(files, key="--data")
    started = time.monotonic()
    result = asyncio.run(_evaluate(subject, files, config))
    _print(result, subject, time.monotonic() - started, as_json=arguments.json)
    return 0


def choose_sampling(arguments: argparse.Namespace, config: EvaluationConfig) -> EvaluationConfig:
    """Return a run's or recipe's settings of evaluation with those that the command line gives."""
    given = {name: vars(arguments)[name] for name in SAMPLING}
    return replace(config, **{name: value for name, value in given.items() if value is not None})


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
        rewards = [RewardConfig(kind="exact")]
        generator = GeneratorConfig(max_new_tokens=tokens)
        around, how = Surroundings(), EvaluationConfig()
        subject = Subject(path, rewards, generator, DataConfig(), around, how)
    else:
        config = load_config(recipe)
        if config.model.trust_remote_code:
            os.environ.update(trusted_env(str(path)))
        generator = GeneratorConfig(
            max_new_tokens=config.generator.max_new_tokens,
            stop=config.generator.stop,
            stop_token_ids=config.generator.stop_token_ids,
        )
        around = Surroundings(config.scorer, config.sandbox)
        how = config.evaluation
        subject = Subject(path, config.rewards, generator, config.data, around, how)
    if arguments.reward is not None:
        # One reward is not combined with any.
        around = replace(subject.around, scorer=replace(subject.around.scorer, combine=""))
        rewards = [RewardConfig(kind=arguments.reward)]
        subject = replace(subject, rewards=rewards, around=around)
    if arguments.max_new_tokens is not None:
        generator = replace(subject.generator, max_new_tokens=arguments.max_new_tokens)
        subject = replace(subject, generator=generator)
    return subject


async def _evaluate(
    subject: Subject, files: Sequence[DataFile], config: EvaluationConfig
) -> EvaluationResult:
    from streamrl.engines.models.supported_models import check_weights

    rewards = build_rewards(subject.rewards, subject.around)
    model = str(subject.model_dir)
    check_weights(model, "model.path")
    tokenizer = load_tokenizer(model)
    limit = subject.data.prompt_limit(
        model_tokens=model_length(model, limit=None),
        max_new_tokens=subject.generator.max_new_tokens,
    )
    limits = Limits(limit, load_vocab_size(model), subject.data.on_long_prompt)
    loaded = load_prompts(files, tokenizer, limits, most=config.limit)
    for note in await rewards.preflight():
        print(f"streamrl: {note}", file=sys.stderr)
    for file in loaded.files:
        rewards.check(file.prompts)
    prompts = loaded.by_name
    longest = max(len(prompt.token_ids) for found in prompts.values() for prompt in found)
    engine = await _engine(subject, config.seed, longest + subject.generator.max_new_tokens)

    async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
        return await engine.generate(prompt.token_ids, seeds=seeds, sampling=config.sampling)

    async def score(prompt: Prompt, rollouts: list[Rollout]) -> Columns:
        judgement = await rewards.judge(prompt, decode_completions(tokenizer, rollouts))
        return {**rewards.columns_of(judgement), "answers": answer_hashes(judgement)}

    try:
        await rewards.start()
        return await evaluate(prompts, generate=generate, score=score, config=config)
    finally:
        await rewards.close()
        await engine.close()


async def _engine(subject: Subject, seed: int, max_length: int) -> "GenerationEngine":
    """An engine that serves the model directory's own weights."""
    import torch

    from streamrl.engines.generation.generator import GenerationEngine

    threads = os.cpu_count() or 1
    # What vLLM and PyTorch say to each other while they are imported is no news to the user.
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM reads these when it is imported, which the engine does when it starts.
    os.environ.update(
        generation_env("cuda" if torch.cuda.is_available() else "cpu", threads=threads)
    )
    config = replace(subject.generator, threads=threads)
    engine = await GenerationEngine.start(
        str(subject.model_dir), config, seed=seed, max_length=max_length
    )
    await engine.use_model_dir(0)
    return engine


def _print(result: EvaluationResult, subject: Subject, seconds: float, *, as_json: bool) -> None:
    model, rewards = subject.model_dir, [reward.kind for reward in subject.rewards]
    if as_json:
        facts = {"model": str(model), "rewards": rewards, "seconds": seconds}
        facts |= {"unscored": result.num_unscored, **_as_dict(result)}
        facts |= {"by_source": {name: _as_dict(one) for name, one in result.by_source.items()}}
        facts |= {"by_file": {name: _as_dict(one) for name, one in result.by_file.items()}}
        print(json.dumps(facts))
        return
    print(f"{model}: {result.num_prompts} prompts x {result.samples} samples in {seconds:.1f} s")
    print(
        f"  scored by {', '.join(rewards)}; at most {subject.generator.max_new_tokens} new tokens"
    )
    intervals = _intervals(result)
    for name, value in _numbers(result).items():
        ends = intervals.get(name)
        sure = f"  (95 %: {ends[0]:.4f} to {ends[1]:.4f})" if ends else ""
        print(f"  {name:<12} {value:.4f}{sure}")
    if result.num_unscored:
        print(f"  {result.num_unscored} prompts more have no score: {result.problem}")
    for kind, parts in (("source", result.by_source), ("file", result.by_file)):
        for name, part in parts.items() if len(parts) > 1 else ():
            figures = ", ".join(f"{key} {value:.4f}" for key, value in _numbers(part).items())
            print(f"  {kind} {name or '(none)'}: {figures} over {part.num_prompts} prompts")


def _as_dict(result: EvaluationResult) -> dict[str, Any]:
    intervals = {f"{name}_interval": ends for name, ends in _intervals(result).items()}
    return {"prompts": result.num_prompts, **_numbers(result), **intervals}


def _numbers(result: EvaluationResult) -> dict[str, float]:
    found = {f"pass@{k}": chance for k, chance in result.pass_at.items()}
    found[f"mean@{result.samples}"] = result.mean_at_k
    if result.maj_at_k is not None:
        found[f"maj@{result.samples}"] = result.maj_at_k
    return found


def _intervals(result: EvaluationResult) -> dict[str, Interval | None]:
    """The 95 % intervals of some of the numbers."""
    intervals = (result.pass_at_1_interval, result.mean_at_k_interval)
    return dict(zip(("pass@1", f"mean@{result.samples}"), intervals, strict=True))
