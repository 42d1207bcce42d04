"""Compare our rewards and divergences with those of verl."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.workers.reward_manager.dapo import DAPORewardManager

from streamrl.algorithms.config import KL_KINDS
from streamrl.algorithms.math import advantages, tokens
from tests.parity.case import Batch, ParityCase
from tests.parity.verl_advantages import outcome_rewards

BUFFER, FACTOR = 9, 0.7


def divergence(kind: str) -> ParityCase:
    """Make a case of a KL estimate near the reference; far away verl caps k3 at 10."""
    return ParityCase(
        f"tokens.kl_estimate, {kind}",
        "kl_penalty",
        lambda b: tokens.kl_estimate(b.logprobs, b.ref_logprobs, kind),
        lambda b: core_algos.kl_penalty(b.logprobs, b.ref_logprobs, kind),
        wrt="logprobs",
    )


def verl_kl_coefs(batch: Batch) -> Tensor:
    """Return the coefficient of verl's controller after one step, per divergence."""
    controllers = [core_algos.AdaptiveKLController(0.1, 0.5, 10_000) for _ in batch.scores]
    for controller, divergence in zip(controllers, batch.scores.tolist(), strict=True):
        controller.update(divergence, 1600)
    return torch.tensor([controller.value for controller in controllers], dtype=torch.float64)


def our_kl_coefs(batch: Batch) -> Tensor:
    adapt = partial(tokens.adapt_kl_coef, target=0.5, num_rollouts=1600)
    coefs = [adapt(0.1, divergence) for divergence in batch.scores.tolist()]
    return torch.tensor(coefs, dtype=torch.float64)


def verl_overlong(batch: Batch) -> Tensor:
    """Return the scores of verl's reward manager for a reward of 0 and the rows' lengths."""
    rows, width = batch.mask.shape
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "", eos_token=".")
    settings = SimpleNamespace(enable=True, len=BUFFER, penalty_factor=FACTOR, log=False)
    manager = DAPORewardManager(
        tokenizer, 0, lambda **row: 0.0, max_resp_len=width, overlong_buffer_cfg=settings
    )
    ids = torch.ones(rows, width + 1, dtype=torch.long)
    lengths = batch.loss_mask.sum(-1, keepdim=True).clamp(min=1)
    data = DataProto.from_dict(
        tensors={
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "attention_mask": (torch.arange(width + 1) <= lengths).long(),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * rows, dtype=object),
            "data_source": np.array(["parity"] * rows, dtype=object),
        },
    )
    return manager(data).sum(-1)


def our_overlong(batch: Batch) -> Tensor:
    lengths = batch.loss_mask.sum(-1).clamp(min=1)
    width = batch.loss_mask.shape[1]
    return advantages.soft_overlong_penalty(lengths, max_length=width, buffer=BUFFER, factor=FACTOR)


CASES = [
    *(divergence(kind) for kind in KL_KINDS),
    ParityCase(
        "shaping.token_rewards",
        "compute_rewards",
        lambda b: advantages.make_token_rewards(
            b.scores, b.loss_mask, 0.1 * (b.values - b.returns)
        ),
        lambda b: core_algos.compute_rewards(outcome_rewards(b), b.values, b.returns, 0.1) * b.mask,
    ),
    ParityCase(
        "shaping.soft_overlong",
        "DAPORewardManager",
        our_overlong,
        verl_overlong,
        dtype=torch.float32,
        note="up to max_length; beyond it verl's goes on falling",
    ),
    ParityCase("kl.adapt_coefficient", "AdaptiveKLController", our_kl_coefs, verl_kl_coefs),
]
