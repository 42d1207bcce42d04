"""A few fixed sequences on which a follower must say what the trainer says.

Checksums prove that the bytes have arrived; a probe proves that they have become the model: that
no layer was left out, swapped, or read in another layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.errors import LogprobCheckError
from streamrl.messages import Array

SEQUENCE_LENGTHS = (64, 64, 64, 512)
"""Tokens of the sequences, unless rollouts are shorter: one is longer than common windows of
attention are in small models."""
NUM_SEQUENCES = len(SEQUENCE_LENGTHS)
SAME_PARAMETERS_HINT = (
    "; their parameters were compared and are the same, so they compute other things with them:"
    " attention (trainer.attention), positions, experts or number types (generator.dtype)"
)
NUM_INITIAL_CHECKS = 3
"""Versions that are probed at first: the model as it was read, and after the first updates, by
which every parameter that is trained has another value."""


def is_logprob_check_due(count: int, *, every: int) -> bool:
    """Tell whether the version published as number `count`, from 0, is probed; never if 0."""
    return bool(every) and (count < NUM_INITIAL_CHECKS or count % every == 0)


@dataclass(frozen=True, eq=False)
class LogprobCheck:
    """Token ids, int32 [T] each, and the trainer's logprob of each token, float32 [T].

    A sequence's first token has none, so that one of a single token has nothing to compare. `limit`
    is the largest difference that passes.
    """

    sequences: Sequence[Array]
    logprobs: Sequence[Array]
    max_difference: float

    def compare_logprobs(
        self, found: Sequence[Array], who: str, *, same_parameters: bool = False
    ) -> float:
        """The largest difference of `found` from the trainer's. Raises ProbeError beyond the limit.

        `who` says whose figures they are; `same_parameters` whether its parameters are known to be
        the trainer's. NaN never passes.
        """
        pairs = zip(self.logprobs, found, strict=True)
        largest = [np.abs(want[1:] - got[1:]).max(initial=0.0) for want, got in pairs]
        difference = float(np.max(largest))  # Python's max may pass over a NaN
        if not difference <= self.max_difference:
            raise LogprobCheckError(
                f"{who} gives log-probabilities that differ from the trainer's by up to"
                f" {difference:.3g} nats, more than"
                f" weights.probe_limit={self.max_difference:g}: generator"
                " and trainer are not one model, and a run would learn from wrong figures"
                f"{SAME_PARAMETERS_HINT if same_parameters else ''}"
            )
        return difference


def make_check_sequences(*, vocab_size: int, max_length: int) -> list[Array]:
    """The same random tokens for every version of a model: any token may occur, at any place."""
    rng = np.random.default_rng(0)
    lengths = [min(length, max_length - 1) for length in SEQUENCE_LENGTHS]
    return [rng.integers(0, vocab_size, length, np.int32) for length in lengths]
