"""`streamrl evaluate`: sample a model on prompt files, score the samples, print the metrics."""

import argparse
import asyncio
import json
import os
import sys
import time
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.arguments.config_args import add_file_options, add_recipe_argument
from streamrl.cli.data import parse_named_files
from streamrl.config.run_config import ConfigSections, load_sections
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.config import DataFile
from streamrl.data.prompt_file import load_prompts
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.environments.episodes.driver import make_environment_seed, start_episode_driver
from streamrl.errors import ConfigError
from streamrl.files.hf_config import make_trusted_env, read_model_length
from streamrl.files.printable_text import format_quantity
from streamrl.files.typed_settings import check_settings
from streamrl.messages import Columns, Prompt, rollouts_to_columns
from streamrl.rewards.interface.completion import decode_rollouts
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_scorer import hash_answers
from streamrl.run_dir.checkpoint import check_model_dir, find_resume_point
from streamrl.run_dir.run_config_file import CONFIG_FILE
from streamrl.stream.evaluation.config import EvaluationConfig
from streamrl.stream.evaluation.metrics import ConfidenceInterval, EvaluationResult
from streamrl.stream.evaluation.sample_and_score import GenerateFn, SampledPrompt, evaluate_policy
from streamrl.telemetry.metric_names import to_json_value
from streamrl.telemetry.progress import ProgressLine, show_progress

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine


SAMPLING_OPTIONS: Mapping[str, tuple[type, str, str]] = {
    "samples": (int, "K", "completions per prompt"),
    "temperature": (float, "T", "sampling temperature; 0 is greedy"),
    "top_p": (float, "P", "nucleus sampling: probability mass to sample from"),
    "top_k": (int, "N", "number of likeliest tokens to sample from; 0 is all"),
    "limit": (int, "N", "use only the first N prompts"),
    "seed": (int, "N", "sampling seed"),
    "pass_score": (float, "SCORE", "lowest score that passes"),
}
"""Settings `evaluation.*` with command-line options: type, metavar and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl evaluate MODEL [--data FILE ...] [--config CONFIG] [options]"
    parser.add_argument(
        "model",
        type=parse_path,
        metavar="MODEL",
        help="model directory, checkpoint or run directory",
    )
    parser.add_argument(
        "--data",
        type=parse_nonempty,
        action="append",
        default=[],
        metavar="FILE",
        help="prompt file, repeatable (default: data.eval of the run or config)",
    )
    add_file_options(parser)
    sampling = parser.add_argument_group("sampling", "default: evaluation.* of the run or config")
    for name, (kind, metavar, text) in SAMPLING_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        sampling.add_argument(option, type=kind, metavar=metavar, help=text)
    add_recipe_argument(parser, "the rewards, max_new_tokens and evaluation.*")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest completion (default: the run's or config's, else 256 or half the context)",
    )
    parser.add_argument(
        "--reward", metavar="KIND", help="reward kind (default: the run's or config's, or exact)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    with show_progress("reading config and prompts") as progress:
        result, config, seconds = _evaluate(arguments, progress)
    _print_result(result, config, seconds, as_json=arguments.json)
    return 0


def _evaluate(
    arguments: argparse.Namespace, progress: ProgressLine
) -> tuple[EvaluationResult, ConfigSections, float]:
    """Evaluate the model of the command line; return its settings and the seconds that it took."""
    config = load_model_settings(arguments.model, arguments.config)
    if arguments.reward is not None:
        config.rewards = [RewardConfig(kind=arguments.reward)]
    if arguments.max_new_tokens is not None:
        config.generator = replace(config.generator, max_new_tokens=arguments.max_new_tokens)
    config.evaluation = choose_sampling(arguments, config.evaluation)
    check_settings(config)
    named = parse_named_files(arguments, arguments.data, config.data)
    # The command line cannot name files, and base names may collide (test.parquet in two folders).
    files = {file.path: file for file in named}
    if len(files) < len(named):
        raise ConfigError("--data: a file is named twice")
    files = files or {file.name: file for file in config.data.eval_files}
    if not files:
        raise ConfigError("evaluate: give prompt files with --data, or data.eval in the recipe")
    started = time.monotonic()
    result = asyncio.run(_evaluate_files(config, files, progress))
    return result, config, time.monotonic() - started


def choose_sampling(arguments: argparse.Namespace, config: EvaluationConfig) -> EvaluationConfig:
    options = {name: vars(arguments)[name] for name in SAMPLING_OPTIONS}
    return replace(config, **{name: value for name, value in options.items() if value is not None})


def load_model_settings(path: Path, recipe: Path | None) -> ConfigSections:
    """Find the model to evaluate; return its settings, with its directory as model.path.

    path: model directory, checkpoint, or run directory, whose newest checkpoint counts. recipe:
    config file or run directory with the settings; None: those of the run, else defaults. Raises
    ConfigError.
    """
    kinds = ("config.json", "state.json", CONFIG_FILE)
    if not any((path / name).is_file() for name in kinds):
        raise ConfigError(
            f"{path}: neither a model directory, nor a checkpoint, nor a run directory: holds none"
            f" of {', '.join(kinds)}"
        )
    if not (path / "config.json").is_file():
        resume = find_resume_point(path)
        if resume.checkpoint is None:
            raise ConfigError(f"{path}: the run has no checkpoint yet")
        path, recipe = resume.checkpoint.model_dir, recipe or resume.run_dir
    config = load_sections(recipe)
    if recipe is None:
        config.rewards = [RewardConfig(kind="exact")]
        config.generator.max_new_tokens = min(256, read_model_length(str(path), limit=None) // 2)
    elif config.model.trust_remote_code:
        os.environ.update(make_trusted_env(str(path)))
    # The engine of a run may be split over devices; this one is a process without options.
    config.generator = GeneratorConfig(
        max_new_tokens=config.generator.max_new_tokens,
        stop=config.generator.stop,
        stop_token_ids=config.generator.stop_token_ids,
    )
    config.model.path = str(path)
    return config


async def _evaluate_files(
    config: ConfigSections, files: Mapping[str, DataFile], progress: ProgressLine
) -> EvaluationResult:
    from streamrl.engines.models.supported_models import check_weight_files

    model = config.model.path
    rewards = build_rewards(config.rewards, RewardContext(config.scorer, config.sandbox))
    check_model_dir(Path(model), "evaluate ")
    check_weight_files(model, "model.path")
    tokenizer = load_tokenizer(model)
    limits = config.make_prompt_limits(model, most_tokens=None)
    loaded = load_prompts(
        [*files.values()], tokenizer, limits, max_prompts=config.evaluation.max_rows
    )
    for note in await rewards.run_preflight():
        print(f"streamrl: {note}", file=sys.stderr)
    prompts = {name: file.prompts for name, file in zip(files, loaded, strict=True)}
    for file_prompts in prompts.values():
        rewards.check_prompts(file_prompts)
    progress.describe("loading the model")
    longest = max(len(prompt.token_ids) for group in prompts.values() for prompt in group)
    engine = await start_engine(config, longest + config.max_completion_tokens)

    async def score(prompt: Prompt, rollouts: Columns) -> Columns:
        result = await rewards.judge_group(prompt, decode_rollouts(tokenizer, rollouts))
        progress.advance()
        return {**rewards.to_columns(result), "answers": hash_answers(result)}

    try:
        await rewards.start()
        async with _open_sampler(config, engine) as generate:
            progress.describe("evaluating", sum(map(len, prompts.values())), "prompts")
            return await evaluate_policy(
                prompts, generate=generate, score=score, config=config.evaluation
            )
    finally:
        await rewards.close()
        await engine.close()


@asynccontextmanager
async def _open_sampler(
    config: ConfigSections, engine: "GenerationEngine"
) -> AsyncIterator[GenerateFn]:
    """Yield the function that samples the rollouts of a prompt: completions, or episodes."""
    sampling = config.evaluation.sampling

    async def generate(prompt: Prompt, seeds: Sequence[int]) -> SampledPrompt:
        rollouts = await engine.generate(prompt.token_ids, seeds=seeds, sampling=sampling)
        return SampledPrompt(rollouts_to_columns(rollouts))

    if not config.environment.is_enabled:
        yield generate
        return
    driver = await start_episode_driver(
        config.environment, config.data, config.generator, engine, config.model.path
    )

    async def run_episodes(prompt: Prompt, seeds: Sequence[int]) -> SampledPrompt:
        episodes = await driver.run_evaluation(
            prompt,
            seeds=seeds,
            environment_seed=make_environment_seed(config.evaluation.seed, prompt.uid),
            compute=lambda **facts: nullcontext({}),
            sampling=sampling,
        )
        return SampledPrompt(*episodes)

    try:
        yield run_episodes
    finally:
        await driver.close()


async def start_engine(config: ConfigSections, max_length: int) -> "GenerationEngine":
    """Start vLLM in this process; `max_length` limits the tokens of prompt plus completion."""
    from streamrl.distributed.devices import has_local_gpu
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.vllm.requests import EngineSpec

    threads = os.cpu_count() or 1
    # vLLM and PyTorch warn about each other on import; users can do nothing about those warnings.
    warnings.simplefilter("ignore", FutureWarning)
    # vLLM reads the environment on import, which happens inside GenerationEngine.start.
    os.environ.update(make_vllm_env("cuda" if has_local_gpu() else "cpu", threads=threads))
    generator = replace(config.generator, threads=threads)
    spec = EngineSpec(config.model.path, generator, max_length, config.evaluation.seed)
    engine = await GenerationEngine.start(spec)
    await engine.use_model_dir(0)
    return engine


def _print_result(
    result: EvaluationResult, config: ConfigSections, seconds: float, *, as_json: bool
) -> None:
    model = config.model.path
    rewards = [reward.kind for reward in config.rewards]
    if as_json:
        fields = {"model": model, "rewards": rewards, "seconds": seconds}
        fields |= {"unscored": result.num_unscored}
        fields |= {"unscored_samples": result.num_unscored_samples, **_result_to_dict(result)}
        for key, parts in (("by_source", result.by_source), ("by_file", result.by_file)):
            fields[key] = {name: _result_to_dict(part) for name, part in parts.items()}
        print(json.dumps(fields))
        return
    prompts = format_quantity(result.num_prompts, "prompt")
    samples = format_quantity(result.samples, "sample")
    print(f"{model}: {prompts} x {samples} in {seconds:.1f} s")
    longest = config.generator.max_new_tokens
    print(f"  scored by {', '.join(rewards)}; at most {longest} new tokens")
    intervals = _collect_intervals(result)
    for name, value in _collect_scores(result).items():
        interval = intervals.get(name)
        note = f"  (95 %: {interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
        print(f"  {name:<14} {value:.4f}{note}")
    if result.unscored_reason:
        print(
            f"  without a score: {result.num_unscored} more prompts, and"
            f" {result.num_unscored_samples} samples of those above: {result.unscored_reason}"
        )
    for kind, parts in (("source", result.by_source), ("file", result.by_file)):
        for name, part in parts.items() if len(parts) > 1 else ():
            metrics = ", ".join(
                f"{key} {value:.4f}" for key, value in _collect_scores(part).items()
            )
            over = format_quantity(part.num_prompts, "prompt")
            print(f"  {kind} {name or '(none)'}: {metrics} over {over}")


def _result_to_dict(result: EvaluationResult) -> dict[str, Any]:
    intervals = {
        f"{name}_interval": interval for name, interval in _collect_intervals(result).items()
    }
    scores = {name: to_json_value(score) for name, score in _collect_scores(result).items()}
    return {"prompts": result.num_prompts, **scores, **intervals}


def _collect_scores(result: EvaluationResult) -> dict[str, float]:
    scores = {f"pass@{k}": chance for k, chance in result.pass_at.items()}
    scores[f"mean@{result.samples}"] = result.mean_at_k
    if result.maj_at_k is not None:
        scores[f"maj@{result.samples}"] = result.maj_at_k
    return {**scores, **result.means}


def _collect_intervals(result: EvaluationResult) -> dict[str, ConfidenceInterval | None]:
    intervals = (result.pass_at_1_interval, result.mean_at_k_interval)
    return dict(zip(("pass@1", f"mean@{result.samples}"), intervals, strict=True))
