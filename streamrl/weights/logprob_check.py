"""Logprob check: fixed sequences whose log-probabilities followers compare with the trainer's.

Checksums prove that the bytes arrived. This check proves that the bytes became the model: no layer
was left out, swapped, or read in a wrong layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.errors import LogprobCheckError
from streamrl.messages import Array

SEQUENCE_LENGTHS = (64, 64, 64, 512)
"""Tokens per sequence, capped by the rollout length. The last is longer than the attention windows
that are common in small models.
"""
NUM_SEQUENCES = len(SEQUENCE_LENGTHS)
SAME_PARAMETERS_HINT = (
    ". Their parameters were compared and are equal, so the computation differs: check"
    " attention (trainer.attention), positions, experts and dtype (generator.dtype)"
)
NUM_INITIAL_CHECKS = 3
"""Publishes checked at the start of a run: the model as loaded, and the first updates, which change
every trained parameter.
"""


def is_logprob_check_due(count: int, *, every: int) -> bool:
    """Return True if the logprob check follows publish number `count`, counted from 0.

    The first three publishes are checked, then every `every`-th; `every` 0 disables the check.
    """
    return bool(every) and (count < NUM_INITIAL_CHECKS or count % every == 0)


@dataclass(frozen=True, eq=False)
class LogprobCheck:
    """Sequences of token ids, int32 [T] each, and the trainer's logprob per token, float32 [T].

    max_difference: limit in nats. The first token of a sequence has no logprob, so a one-token
    sequence compares nothing.
    """

    sequences: Sequence[Array]
    logprobs: Sequence[Array]
    max_difference: float

    def compare_logprobs(
        self, logprobs: Sequence[Array], follower: str, *, same_parameters: bool = False
    ) -> float:
        """Return the largest difference, in nats, between a follower's logprobs and the trainer's.

        `logprobs`: the follower's, an array for each sequence. `follower` names the model in the
        error; `same_parameters`: its parameters are known to equal the trainer's. Raises
        LogprobCheckError if the difference exceeds `max_difference` or is NaN.
        """
        pairs = zip(self.logprobs, logprobs, strict=True)
        differences = [np.abs(ours[1:] - theirs[1:]).max(initial=0.0) for ours, theirs in pairs]
        difference = float(np.max(differences))  # Python's max may skip a NaN
        if not difference <= self.max_difference:
            raise LogprobCheckError(
                f"{follower} gives log-probabilities that differ from the trainer's by up to"
                f" {difference:.3g} nats, more than"
                f" weights.probe_limit={self.max_difference:g}: generator"
                " and trainer do not compute the same model, so training would be wrong"
                f"{SAME_PARAMETERS_HINT if same_parameters else ''}"
            )
        return difference


def make_check_sequences(*, vocab_size: int, max_length: int) -> list[Array]:
    """Return the token sequences of the logprob check: random, the same for every version.

    `max_length`: longest rollout in tokens.
    """
    rng = np.random.default_rng(0)
    lengths = [min(length, max_length - 1) for length in SEQUENCE_LENGTHS]
    return [rng.integers(0, vocab_size, length, np.int32) for length in lengths]
