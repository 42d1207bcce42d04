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
CHECKED_QUANTILE, QUANTILE_FACTOR, SPREAD_SHARE = 0.9, 2.5, 0.3
"""Limits by measurement: docs/models.md. Rounding to bfloat16 reaches two thirds of them."""
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

    limit: nats by which the tokens may differ on average; 90 % may differ by QUANTILE_FACTOR times
    as much, and a few by more: where rounding flips the choice of an expert. Where logprobs are
    spread by more than 1 / SPREAD_SHARE nats, logits are large, and rounding and limit grow with
    them. The first token of a sequence has no logprob: a one-token sequence compares nothing.
    """

    sequences: Sequence[Array]
    logprobs: Sequence[Array]
    limit: float

    def compare_logprobs(
        self, logprobs: Sequence[Array], follower: str, *, same_parameters: bool = False
    ) -> float:
        """Return the largest difference, in nats, between a follower's logprobs and the trainer's.

        `logprobs`: the follower's, an array for each sequence. `follower` names the model in the
        error; `same_parameters`: its parameters are known to equal the trainer's. Raises
        LogprobCheckError if the differences exceed `limit` or one is NaN.
        """
        pairs = zip(self.logprobs, logprobs, strict=True)
        differences = np.concatenate([np.abs(ours[1:] - theirs[1:]) for ours, theirs in pairs])
        if not differences.size:
            return 0.0
        spread = np.concatenate([ours[1:] for ours in self.logprobs]).std()
        limit = self.limit * max(1.0, SPREAD_SHARE * float(spread))
        mean, quantile = differences.mean(), np.quantile(differences, CHECKED_QUANTILE)
        # A NaN exceeds every limit.
        if not (mean <= limit and quantile <= QUANTILE_FACTOR * limit):
            raise LogprobCheckError(
                f"{follower} gives log-probabilities that differ from the trainer's by {mean:.3g}"
                f" nats on average, and by {quantile:.3g} or more in a tenth of the tokens: with"
                f" weights.probe_limit={self.limit:g} these may be {limit:.3g} and"
                f" {QUANTILE_FACTOR * limit:.3g}. Generator and trainer do not compute the same"
                " model, so training would be wrong"
                f"{SAME_PARAMETERS_HINT if same_parameters else ''}"
            )
        return float(differences.max())


def make_check_sequences(*, vocab_size: int, max_length: int) -> list[Array]:
    """Return the token sequences of the logprob check: random, the same for every version.

    `max_length`: longest rollout in tokens.
    """
    rng = np.random.default_rng(0)
    lengths = [min(length, max_length - 1) for length in SEQUENCE_LENGTHS]
    return [rng.integers(0, vocab_size, length, np.int32) for length in lengths]
