"""PPO as an own loop: python -m examples.own_loop.ppo --steps 30"""

from collections.abc import Iterator

from examples.own_loop.loop_setup import LoopSetup, Step, main
from streamrl.own_loops.model_workers import CriticWorker, PolicyWorker, ScorerWorker


def ppo(setup: LoopSetup) -> Iterator[Step]:
    """Train a policy with PPO: a critic predicts the return, the policy learns from the rest."""
    policy = setup.start_group(PolicyWorker)
    critic = setup.start_group(CriticWorker)
    reference = setup.start_group(ScorerWorker, "reference", ranks=1)
    reward = setup.start_group(ScorerWorker, "reward", ranks=1)

    for batch in setup.batches:
        batch |= policy.generate_sequences(batch)
        batch |= critic.compute_values(batch) | reference.score(batch) | reward.score(batch)
        batch |= policy.compute_advantages(batch)
        critic_metrics = critic.update_critic(batch)
        yield policy.update_policy(batch), critic_metrics


if __name__ == "__main__":
    main(ppo, "configs/ppo_arithmetic.yaml", "trainer.lr=2e-4", "critic.warmup_alone=2")
