"""Episodes of a group: the rollouts that are samples of each, and checks of their columns."""

import numpy as np

from streamrl.errors import ContractError
from streamrl.messages import EPISODE_COLUMN, Array, Columns, TokenSource


def count_samples(columns: Columns) -> Array:
    """Return the number of rollouts of each episode of a group, int64 [E]."""
    if EPISODE_COLUMN not in columns:
        return np.ones(len(columns["lengths"]), np.int64)
    return np.bincount(columns[EPISODE_COLUMN])


def find_first_samples(samples: Array) -> Array:
    """Return the index of each episode's first rollout, given `count_samples`: int64 [E]."""
    firsts: Array = np.cumsum(samples) - samples
    return firsts


def sum_over_samples(column: Array, samples: Array) -> Array:
    """Return the sum of a column [R] over the samples of each episode: [E]."""
    sums: Array = np.add.reduceat(column, find_first_samples(samples))
    return sums


def check_samples(columns: Columns) -> None:
    """Raise ContractError unless episodes are numbered from 0, their samples next to each other."""
    if EPISODE_COLUMN not in columns:
        return
    episodes, num_rollouts = columns[EPISODE_COLUMN], len(columns["lengths"])
    steps = np.diff(episodes, prepend=-1)
    is_in_order = np.isin(steps, (0, 1)).all() and (episodes >= 0).all()
    if len(episodes) != num_rollouts or not is_in_order:
        raise ContractError(
            f"column {EPISODE_COLUMN}: {episodes.tolist()[:16]} for {num_rollouts} rollouts; must"
            " number the episodes from 0, samples of an episode next to each other"
        )


def check_loss_mask(columns: Columns) -> None:
    """Raise ContractError if loss_mask is true for a token that the policy did not sample.

    For the rollouts of an environment, which have `token_source`. Training on the environment's
    words also raises the reward, by less, so that no metric shows the mistake.
    """
    if "token_source" not in columns:
        return
    loss_mask, source = columns["loss_mask"], columns["token_source"]
    if loss_mask.size != source.size:
        sizes = f"loss_mask[{loss_mask.size}], token_source[{source.size}]"
        raise ContractError(f"columns of one group differ in length: {sizes}")
    wrong = np.flatnonzero(loss_mask & (source != TokenSource.SAMPLED))
    if wrong.size:
        first = int(wrong[0])
        raise ContractError(
            f"column loss_mask: true for token {first} of the group, which the policy did not"
            f" sample: its token_source is {TokenSource(int(source[first])).name}"
        )
