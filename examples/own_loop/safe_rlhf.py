"""Safe RLHF as an own loop: python -m examples.own_loop.safe_rlhf --steps 30"""

from collections.abc import Iterator

from examples.own_loop.command_line import Step, main
from streamrl.own_loops.loop import OwnLoop
from streamrl.own_loops.model_workers import CriticWorker, PolicyWorker, ScorerWorker


def safe_rlhf(loop: OwnLoop) -> Iterator[Step]:
    """Train with Safe RLHF: reward under a cost limit, a critic for each, and a multiplier."""
    policy = loop.start_group(PolicyWorker)
    critic = loop.start_group(CriticWorker, "critic")
    cost_critic = loop.start_group(CriticWorker, "cost_critic")
    scorers = [loop.start_group(ScorerWorker, role, ranks=1) for role in ("reward", "cost")]
    scorers.append(loop.start_reference(policy))

    for batch in loop.batches:
        batch |= policy.generate_sequences(batch)
        scored = critic.compute_values(batch) | cost_critic.compute_values(batch)
        for scorer in scorers:
            scored |= scorer.score(batch)
        batch |= scored
        batch |= policy.compute_advantages(batch)
        critic_metrics = critic.update_critic(batch), cost_critic.update_critic(batch)
        yield policy.update_policy(batch), *critic_metrics


if __name__ == "__main__":
    main(safe_rlhf, "configs/safe_rlhf_toy.yaml", "critic.warmup_alone=2")
