"""Differences between trainer, generator and plain transformers, by model family.

    python -m benchmarks.families [FAMILY ...]

Models are tiny and random. Differences are of log-probabilities of fixed sequences, in nats: the
largest one in float32, and mean, 90 % quantile and largest one of a bfloat16 generator and a
bfloat16 trainer. limit_share: the larger share of the logprob check's limits on mean and quantile.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.command import BenchmarkParser, report_progress, run_benchmark
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.forward import (
    ModelLoadOptions,
    compute_token_logprobs,
    load_model,
)
from streamrl.messages import Array
from streamrl.weights.config import ROUNDED_LOGPROB_LIMIT
from streamrl.weights.versions import (
    CHECKED_QUANTILE,
    QUANTILE_FACTOR,
    SPREAD_SHARE,
    make_check_sequences,
)
from tests.engines.flight import start_engine
from tests.engines.test_architectures import make_model
from tests.engines.tiny_families import QUICK, SLOW, VOCABULARY
from tests.engines.tiny_qwen import MAX_LENGTH, weights_of

OPTIONS = ModelLoadOptions(max_length=MAX_LENGTH)


def score(model: Any, sequences: Sequence[Array]) -> Array:
    """Return the trainer's log-probabilities of all tokens but the first of each sequence."""
    rows = [torch.from_numpy(ids)[None].long() for ids in sequences]
    scores = [compute_token_logprobs(model, ids, ids >= 0, temperature=1.0) for ids in rows]
    return np.concatenate([s.logprobs[0, 1:].detach().float().numpy() for s in scores])


@torch.no_grad()
def score_plainly(folder: str, sequences: Sequence[Array]) -> Array:
    """Score with transformers alone; the longest row chooses LongRoPE's factors, so pad to it."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    results = []
    for sequence in sequences:
        ids = torch.from_numpy(np.pad(sequence, (0, MAX_LENGTH - len(sequence))))[None].long()
        logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        results.append(logprobs[0, :-1].gather(-1, ids[0, 1:, None])[: len(sequence) - 1, 0])
    return torch.cat(results).numpy()


async def score_by_generator(model: Any, folder: str, dtype: str, sequences: Any) -> Array:
    async with start_engine(folder, GeneratorConfig(max_new_tokens=12, dtype=dtype)) as engine:
        await engine.load_weights(weights_of(model), 0)
        scores = await engine.compute_logprobs(sequences)
    return np.concatenate([logprobs[1:] for logprobs in scores])


def describe_differences(first: Array, second: Array) -> dict[str, float]:
    difference = np.abs(first - second)
    mean, quantile = difference.mean(), np.quantile(difference, CHECKED_QUANTILE)
    limit = ROUNDED_LOGPROB_LIMIT * max(1.0, SPREAD_SHARE * float(second.std()))
    return {
        "limit_share": float(max(mean, quantile / QUANTILE_FACTOR) / limit),
        "mean": float(mean),
        "quantile": float(quantile),
        "largest": float(difference.max()),
    }


async def measure_family(family: str, folder: str) -> Mapping[str, Any]:
    make_model(family, Path(folder), seed=1)
    sequences = make_check_sequences(vocab_size=VOCABULARY, max_length=MAX_LENGTH)
    plain = score_plainly(folder, sequences)
    trained = load_model(folder, dtype=torch.float32, options=OPTIONS)
    checkpoint_layers(trained, offload=False, chunk_mlps=True)
    first, second = score(trained, sequences), score(trained, sequences)
    rounded = score(load_model(folder, dtype=torch.bfloat16, options=OPTIONS), sequences)
    exact = await score_by_generator(trained, folder, "float32", sequences)
    half = await score_by_generator(trained, folder, "bfloat16", sequences)
    return {
        "trainer_twice": float(np.abs(first - second).max()),
        "trainer_plain": float(np.abs(first - plain).max()),
        "generator_plain": float(np.abs(exact - plain).max()),
        "bfloat16_generator": describe_differences(half, first),
        "bfloat16_both": describe_differences(half, rounded),
    }


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("benchmarks.families", __doc__)
    parser.add_argument("families", nargs="*", default=[*QUICK, *SLOW], metavar="FAMILY")
    parser.set_quick(families=["gpt2"])
    return parser


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            results[family] = dict(asyncio.run(measure_family(family, folder)))
        report_progress(family)
    return results


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
