"""PPO as an own loop: python -m examples.own_loop.ppo --steps 30"""

from collections.abc import Iterator

from examples.own_loop.stage import Stage, Step, main
from streamrl.actors.worker_groups.model_workers import (
    CriticWorker,
    PolicyWorker,
    ReferenceWorker,
    RewardWorker,
)


def ppo(stage: Stage) -> Iterator[Step]:
    """Train a policy with PPO: a critic predicts the return, the policy learns from the rest."""
    policy = stage.group(PolicyWorker, stage.max_length)
    critic = stage.group(CriticWorker, stage.max_length)
    reference = stage.group(ReferenceWorker, stage.max_length, ranks=1)
    reward = stage.group(RewardWorker, ranks=1)

    for batch in stage.batches:
        batch |= policy.generate_sequences(batch)
        values = critic.compute_values(batch)
        ref_logprobs = reference.compute_ref_logprobs(batch)
        rewards = reward.compute_rewards(batch)
        batch |= values | ref_logprobs | rewards
        batch |= policy.compute_advantages(batch)
        critic_metrics = critic.update_critic(batch)
        yield policy.update_policy(batch), critic_metrics


if __name__ == "__main__":
    main(ppo, "configs/ppo_arithmetic.yaml", "trainer.lr=2e-4", "critic.warmup_alone=2")
