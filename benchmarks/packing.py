"""Packing against padding: `python -m benchmarks.packing` prints one JSON object.

Tokens per second of the policy's loss and its backward pass, without counting padding, of a small
model on one CPU thread, by processor time. Each round runs a training step both ways, on the same
micro-batches; figures are medians over rounds.

streamed    long-tailed lengths (lognormal); micro-batches form while groups arrive
whole_step  the same rollouts; micro-batches form once all have arrived, sorted by length
full        rollouts of equal length, where padding loses nothing

`padding` is the part of a padded step's tokens that is padding.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.random_model import SHAPES, make_model
from streamrl.algorithms import AlgorithmConfig
from streamrl.buffer.micro_batch_schedule import MicroBatch, MicroBatchPacker
from streamrl.engines.models.packed_rows import enable_packing
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.engines.training.tasks import PolicyTask
from streamrl.messages import Columns, FinishReason, Rollout, rollouts_to_columns

GROUP_SIZE = 8
PROMPT_TOKENS = 24
MEDIAN_TOKENS, SIGMA = 100, 0.9
"""Median of the completions' lengths, and deviation of their logarithm."""
FULL_TOKENS = 256
CASES = {"streamed": False, "whole_step": False, "full": True}
"""Whether all rollouts of a case have equal lengths."""


def make_task(max_length: int) -> PolicyTask:
    config = AlgorithmConfig()
    settings = config.to_settings(max_length=max_length, reward_weights={})
    return PolicyTask("", config.spec, settings, 1.0)


def make_groups(lengths: Sequence[int], vocabulary: int) -> dict[str, Columns]:
    """Make groups of random rollouts, with completions of these lengths, by uid."""
    rng = np.random.default_rng(0)
    groups: dict[str, Columns] = {}
    for start in range(0, len(lengths), GROUP_SIZE):
        rollouts = [
            Rollout.from_single_turn(
                rng.integers(3, vocabulary, PROMPT_TOKENS).astype(np.int32),
                rng.integers(3, vocabulary, length).tolist(),
                logprobs=(-rng.uniform(2, 6, length)).tolist(),
                versions=[0] * length,
                finish_reason=FinishReason.STOP,
            )
            for length in lengths[start : start + GROUP_SIZE]
        ]
        scores = rng.random(len(rollouts)).astype(np.float32)
        groups[f"0:{start}:0"] = {**rollouts_to_columns(rollouts), "scores": scores}
    return groups


def iter_micro_batches(
    groups: Mapping[str, Columns], budget: int, *, is_streamed: bool
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step as the trainer forms them."""
    packer = MicroBatchPacker(dp_size=1, micro_batch_tokens=budget)
    for uid, columns in groups.items():
        packer.add_group(uid, columns["lengths"].tolist())
        if is_streamed:
            for (picks,) in packer.take_rounds(final=False):
                yield picks
    for (picks,) in packer.take_rounds(final=True):
        yield picks


def time_step(task: PolicyTask, model: PreTrainedModel, batches: Sequence[TensorDict]) -> float:
    """Run loss and backward pass of all micro-batches; return the processor's seconds."""
    model.zero_grad()
    started = time.process_time()
    for batch in batches:
        loss, _ = task.compute_loss(model, batch, version=0)
        loss.backward()
    return time.process_time() - started


def measure_case(arguments: argparse.Namespace, case: str) -> Mapping[str, Any]:
    model = make_model(arguments.millions, max_length=arguments.longest).train()
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, arguments.rollouts).astype(int)
    lengths = np.full_like(drawn, FULL_TOKENS) if CASES[case] else drawn
    lengths = np.clip(lengths, 1, arguments.longest - PROMPT_TOKENS)
    task = make_task(arguments.longest)
    groups = make_groups(lengths.tolist(), model.config.vocab_size)
    derived = derive_columns(task.spec, task.settings, groups)
    batches = [
        build_batch(groups, picks, derived=derived, token_columns=task.token_columns)
        for picks in iter_micro_batches(
            groups, arguments.micro_batch_tokens, is_streamed=case == "streamed"
        )
    ]
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded_tokens = sum(batch["token_ids"].numel() for batch in batches)
    rates: dict[str, list[float]] = {"padded": [], "packed": []}
    for number in range(arguments.rounds + 1):
        model.set_attn_implementation("sdpa")
        padded_s = time_step(task, model, batches)
        enable_packing(model)
        packed_s = time_step(task, model, batches)
        if number:  # The first round warms up.
            rates["padded"].append(tokens / padded_s)
            rates["packed"].append(tokens / packed_s)
        report_progress(f"{case}: padded {padded_s:.2f} s, packed {packed_s:.2f} s")
    ratios = [packed / padded for padded, packed in zip(*rates.values(), strict=True)]
    return {
        "tokens": tokens,
        "longest": int(lengths.max()) + PROMPT_TOKENS,
        "micro_batches": len(batches),
        "padding": round(1 - tokens / padded_tokens, 3),
        **{f"{way}_tokens_per_s": round(statistics.median(rates[way])) for way in rates},
        "packed_over_padded": round(statistics.median(ratios), 3),
    }


def measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    return {case: measure_case(arguments, case) for case in CASES}


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("packing", __doc__)
    parser.add_argument("--millions", type=int, choices=SHAPES, default=10, help="of parameters")
    parser.add_argument("--rollouts", type=at_least(1), default=32)
    parser.add_argument("--longest", type=at_least(64), default=1024, help="rollout, in tokens")
    parser.add_argument("--micro-batch-tokens", type=at_least(64), default=4096)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.set_quick(millions=1, rollouts=16, longest=256, micro_batch_tokens=1024, rounds=1)
    return parser


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
