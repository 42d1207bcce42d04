"""A mixture of experts with and without router replay: `python -m benchmarks.router_replay`.

Prints one JSON object. A Qwen3-MoE of 8 experts in two layers, two of them for each token, is
pretrained on the sums of examples/arithmetic and then trained by GRPO at staleness 0, with a
generator in bfloat16 and a trainer in float32. Per setting of algorithm.router_replay, over all
steps: mismatch_frac (routing/mismatch_frac; r2 compares with the pass before the step), kl
(correction/kl), chi2 (correction/chi2_token, about twice the KL, without its noise), both from the
policy at the start of the step, and reward, the mean of the last quarter. Results are medians over
the seeds with minimum and maximum.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, load_quiet, make_arithmetic, train_run
from benchmarks.staleness import summarize_seeds
from examples.arithmetic.problems import make_rows
from examples.arithmetic.training import LESSONS
from examples.arithmetic.training import RECIPE as PRETRAINING
from examples.toy_models.base_model import write_demonstrations
from examples.toy_models.small_qwen2 import MAX_TOKENS, make_tokenizer, save_model
from examples.toy_models.training import train_on_rows
from streamrl.actors.engine_factory import RealEngineFactory

REPLAYS = ("measure", "r2", "r3")


def make_parser() -> BenchmarkParser:
    """Declare settings and the lengths of pretraining and runs."""
    parser = BenchmarkParser("router_replay", __doc__)
    parser.add_argument("--replays", nargs="+", default=list(REPLAYS), choices=REPLAYS)
    parser.add_argument("--pretraining", type=at_least(1), default=300, help="steps before RL")
    parser.add_argument("--steps", type=at_least(1), default=40, help="steps of each run")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    parser.set_quick(pretraining=5, steps=2, seeds=[0])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pretrain a mixture for each seed and train it with each setting."""
    make_arithmetic()
    results: dict[str, list[dict[str, float]]] = {replay: [] for replay in arguments.replays}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            report_progress(f"seed {seed}: {arguments.pretraining} steps of pretraining")
            make_mixture(Path(folder), seed=seed, num_steps=arguments.pretraining)
            for replay, rows in results.items():
                report_progress(f"router_replay={replay}, seed {seed}: {arguments.steps} steps")
                rows.append(measure_run(Path(folder), replay, arguments.steps, seed))
    return {
        "pretraining": arguments.pretraining,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "runs": [{"replay": name, **summarize_seeds(rows)} for name, rows in results.items()],
    }


def make_mixture(folder: Path, *, seed: int, num_steps: int) -> None:
    """Write `model/`, a mixture of 0.4 M parameters, pretrained on sums, some with slips."""
    tokenizer = make_tokenizer(LESSONS.opening)
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **special_ids,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, **special_ids
    )
    recipe = replace(PRETRAINING, num_steps=num_steps)
    rows = make_rows(seed=seed)["train"]
    shown = write_demonstrations(rows, LESSONS.demonstrate, recipe, seed=seed)
    save_model(model, tokenizer, folder / "untrained")
    train_on_rows(folder / "untrained", shown, folder / "model", recipe, seed=seed)


def measure_run(folder: Path, replay: str, steps: int, seed: int) -> dict[str, float]:
    """Train the mixture; return its figures."""
    settings = [
        *(f"model.path={folder / 'model'}", f"run.dir={folder}", f"run.name={replay}"),
        *(f"run.steps={steps}", f"run.seed={seed}", f"algorithm.router_replay={replay}"),
        *("generator.dtype=bfloat16", "pipeline.max_staleness=0", "checkpoint.every=0"),
        *("algorithm.mini_batches=2", "algorithm.correction.proximal=trainer"),
        "evaluation.every=0",
    ]
    rows = train_run(load_quiet(RECIPE, settings), RealEngineFactory())

    def average(name: str, start: int = 0) -> float:
        values = [row[name] for row in rows[start:]]
        return float(sum(values) / len(values))

    return {
        "mismatch_frac": average("routing/mismatch_frac"),
        "kl": average("correction/kl"),
        "chi2": average("correction/chi2_token"),
        "reward": average("reward/mean", -max(1, steps // 4)),
    }


if __name__ == "__main__":
    main()
