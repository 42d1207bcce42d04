"""ReMax as an own loop: python -m examples.own_loop.remax --steps 30"""

from collections.abc import Iterator

from examples.own_loop.command_line import Step, main
from streamrl.own_loops.loop import OwnLoop
from streamrl.own_loops.model_workers import PolicyWorker, ScorerWorker


def remax(loop: OwnLoop) -> Iterator[Step]:
    """Train with ReMax: no critic; the baseline is the reward of the greedy completion."""
    policy = loop.start_group(PolicyWorker)
    reference = loop.start_reference(policy)
    reward = loop.start_group(ScorerWorker, "reward", ranks=1)

    for batch in loop.batches:
        batch |= policy.generate_sequences(batch) | policy.generate_greedy(batch)
        batch |= reference.score(batch) | reward.score(batch)
        batch |= policy.compute_advantages(batch)
        yield (policy.update_policy(batch.drop("greedy_ids")),)


if __name__ == "__main__":
    main(remax, "configs/remax_arithmetic.yaml", "algorithm.kl_coef=0.001")
