"""GRPO as an own loop: python -m examples.own_loop.grpo --steps 30"""

from collections.abc import Iterator

from examples.own_loop.command_line import Step, main
from streamrl.own_loops.loop import OwnLoop
from streamrl.own_loops.model_workers import PolicyWorker, ScorerWorker


def grpo(loop: OwnLoop) -> Iterator[Step]:
    """Train with GRPO: no critic; rollouts of a prompt are measured by each other."""
    policy = loop.start_group(PolicyWorker)
    reference = loop.start_reference(policy)
    reward = loop.start_group(ScorerWorker, "reward", ranks=1)
    loop.load_checkpoint()

    for batch in loop.batches:
        batch |= policy.generate_sequences(batch)
        batch |= policy.compute_logprobs(batch) | reference.score(batch) | reward.score(batch)
        batch |= policy.compute_advantages(batch)
        yield (policy.update_policy(batch),)
        if loop.is_checkpoint_due:
            loop.save_checkpoint()


SETTINGS = ("algorithm.kl_coef=0.001", "algorithm.correction.proximal=trainer")
SAVING = ("run.name=own_grpo", "checkpoint.every=10")

if __name__ == "__main__":
    main(grpo, "configs/grpo_arithmetic.yaml", *SETTINGS, *SAVING)
