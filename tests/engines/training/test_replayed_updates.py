"""Updates of a mixture of experts that keep the experts of the pass before the first (R2)."""

import os
from pathlib import Path
from typing import Any

import pytest

from streamrl.algorithms import AlgorithmConfig
from streamrl.engines.models.tensor_parallel_support import get_expert_sizes
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.tasks import PolicyTask
from tests import forked
from tests.engines.tiny_families import make_model
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import save
from tests.engines.trainer_ranks import find_free_ports

GROUPS = make_groups(num_groups=2, group_size=2)
PICKS = [[(uid, index) for index in range(2)] for uid in GROUPS]


def train_step(
    path: str, port: int, rank: int, settings_of_ranks: dict[str, Any]
) -> list[dict[str, float]]:
    """Return the sums of four micro-batches: two updates of two epochs each."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    algorithm = AlgorithmConfig(epochs=2, mini_batches=2, router_replay="r2", group_size=2)
    settings = algorithm.to_settings(max_length=16, reward_weights={})
    assert settings.should_recompute_logprobs
    config = TrainerConfig(lr=0.05, gradient_checkpointing=True, **settings_of_ranks)
    task = PolicyTask(path, algorithm.spec, settings, 1.0)
    trainer = ModelTrainer(task, config=config, rank=rank)
    trainer.plan_step(GROUPS)
    for picks in PICKS:
        trainer.precompute_logprobs(GROUPS, picks)
    trainer.sync_plan()
    sums = []
    for epoch in range(2):
        for picks in PICKS:
            sums.append(trainer.train_micro_batch(GROUPS, picks, epoch=epoch))
            trainer.update(trainer.compute_loss_denominator(sums[-1]))
    trainer.close()
    return sums


LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspeed": {"backend": "deepspeed"},
    "tensor parallel": {"backend": "torch", "world_size": 2, "tensor_parallel": 2},
    "sequence parallel": {"backend": "torch", "world_size": 2, "sequence_parallel": 2},
}


@pytest.mark.slow
def test_each_update_uses_the_experts_of_the_pass_before_the_first(tmp_path: Path):
    model = make_model("qwen3_moe")
    save(model, tmp_path)
    num_layers = get_expert_sizes(model.config).num_layers
    layouts = {"torch": {"backend": "torch"}, **LAYOUTS}
    results = {}
    for name, layout in layouts.items():
        (port,) = find_free_ports(1)
        ranks = range(layout.get("world_size", 1))
        arguments = [(str(tmp_path), port, rank, layout) for rank in ranks]
        results[name] = forked.run(train_step, arguments, timeout_s=120)[0]
    for name, sums in results.items():
        for micro_batch, uid in zip(sums, [*GROUPS, *GROUPS], strict=True):
            # Ranks that share tokens count their own.
            num_tokens = len(GROUPS[uid]["token_ids"])
            share = layouts[name].get("sequence_parallel", 1)
            assert micro_batch["num_routed"] == pytest.approx(
                num_layers * num_tokens / share, abs=num_layers * (share - 1)
            )
        # Before the first update the routers choose the same; after it they would choose others.
        assert sums[0]["num_rerouted"] == 0
        assert all(later["num_rerouted"] > 0 for later in sums[1:])
        for part in ("loss_policy_sum", "log_ratio_sum"):
            ours, single = ([x[part] for x in run] for run in (sums, results["torch"]))
            assert ours == pytest.approx(single, rel=2e-2, abs=2e-2)
