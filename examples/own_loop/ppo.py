"""PPO as an own loop: python -m examples.own_loop.ppo --steps 30"""

from collections.abc import Iterator

from examples.own_loop.command_line import Step, main
from streamrl.own_loops.loop import OwnLoop
from streamrl.own_loops.model_workers import CriticWorker, PolicyWorker, ScorerWorker


def ppo(loop: OwnLoop) -> Iterator[Step]:
    """Train a policy with PPO: a critic predicts the return, the policy learns from the rest."""
    policy = loop.start_group(PolicyWorker)
    critic = loop.start_group(CriticWorker)
    reference = loop.start_reference(policy)
    reward = loop.start_group(ScorerWorker, "reward", ranks=1)
    loop.load_checkpoint()

    for batch in loop.batches:
        batch |= policy.generate_sequences(batch)
        batch |= policy.compute_logprobs(batch) | critic.compute_values(batch)
        batch |= reference.score(batch) | reward.score(batch)
        batch |= policy.compute_advantages(batch)
        critic_metrics = critic.update_critic(batch)
        yield policy.update_policy(batch), critic_metrics
        if loop.is_checkpoint_due:
            loop.save_checkpoint()


SETTINGS = ("trainer.lr=2e-4", "critic.warmup_alone=2", "run.name=own_ppo")

if __name__ == "__main__":
    main(ppo, "configs/ppo_arithmetic.yaml", *SETTINGS)
