"""Safe RLHF as an own loop: python -m examples.own_loop.safe_rlhf --steps 30"""

from collections.abc import Iterator

from examples.own_loop.stage import Stage, Step, main
from streamrl.actors.worker_groups.model_workers import (
    CriticWorker,
    PolicyWorker,
    ReferenceWorker,
    RewardWorker,
)
from streamrl.dataflow import COST_CALL, COST_CRITIC, CRITIC, REWARD_CALL


def safe_rlhf(stage: Stage) -> Iterator[Step]:
    """Train a policy with Safe RLHF: reward under a cost limit, a critic for each, and a
    multiplier.
    """
    policy = stage.group(PolicyWorker, stage.max_length)
    critic = stage.group(CriticWorker, stage.max_length, CRITIC)
    cost_critic = stage.group(CriticWorker, stage.max_length, COST_CRITIC)
    reference = stage.group(ReferenceWorker, stage.max_length, ranks=1)
    reward = stage.group(RewardWorker, REWARD_CALL.role, ranks=1)
    cost = stage.group(RewardWorker, COST_CALL.role, ranks=1)

    for batch in stage.batches:
        batch |= policy.generate_sequences(batch)
        values, cost_values = critic.compute_values(batch), cost_critic.compute_values(batch)
        ref_logprobs = reference.compute_ref_logprobs(batch)
        rewards, costs = reward.compute_rewards(batch), cost.compute_costs(batch)
        batch |= values | cost_values | ref_logprobs | rewards | costs
        batch |= policy.compute_advantages(batch)
        critic_metrics = critic.update_critic(batch), cost_critic.update_critic(batch)
        yield policy.update_policy(batch), *critic_metrics


if __name__ == "__main__":
    main(safe_rlhf, "configs/safe_rlhf_toy.yaml", "critic.warmup_alone=2")
