"""Groups of random episodes, in which an episode is one rollout, or several samples of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array, Columns, FinishReason

WEIGHTS = {"right": 1.0, "short": 0.5}
MAX_SAMPLED = 12
"""Most sampled tokens of an episode."""
_TOKEN_VALUES = ("token_scores", "generator_logprobs", "ref_logprobs", "values", "cost_values")
_REASONS = (FinishReason.STOP, FinishReason.TURNS, FinishReason.TIMEOUT)


@dataclass(frozen=True)
class RandomEpisode:
    """Sampled tokens by turn, with what the stages compute for each token, and scores.

    turns: for each turn, the values of its N sampled tokens by column, [N] each; `turn_states` is
        the number of the turn's state.
    scores: values of the columns with an entry per rollout.
    """

    turns: list[Mapping[str, Array]]
    scores: Mapping[str, float]


def make_episode(rng: np.random.Generator) -> RandomEpisode:
    turns: list[Mapping[str, Array]] = []
    for _ in range(rng.integers(1, 5)):
        count = int(rng.integers(1, MAX_SAMPLED // 4 + 1))
        values = {name: rng.normal(-1.5, 0.5, count) for name in _TOKEN_VALUES}
        trained = values["generator_logprobs"] + rng.normal(0, 0.3, count)
        state = np.array(rng.integers(3))
        entropy = rng.normal(2, 0.1, count)
        turns.append({**values, "logprobs": trained, "entropy": entropy, "turn_states": state})
    names = ("scores", "costs", "baseline_scores", *(f"reward/{name}" for name in WEIGHTS))
    # Some scores are 0.
    scores = {name: float(rng.normal() * (rng.random() < 0.8)) for name in names}
    reason = _REASONS[int(rng.integers(len(_REASONS)))]
    return RandomEpisode(turns, scores | {"finish_reason": reason.value})


def make_groups(
    episodes: Mapping[str, list[RandomEpisode]], rng: np.random.Generator, *, is_split: bool
) -> dict[str, Columns]:
    """Return the columns of each group; with `is_split`, of episodes cut at random ends of turns.

    The trained policy's `logprobs` and `entropy` are among the columns. Each sample begins with a
    context of random length that is not trained.
    """
    return {uid: _make_columns(group, rng, is_split=is_split) for uid, group in episodes.items()}


def _make_columns(
    group: list[RandomEpisode], rng: np.random.Generator, *, is_split: bool
) -> Columns:
    rows: list[tuple[int, list[Mapping[str, Array]]]] = []
    for number, episode in enumerate(group):
        cuts = [i for i in range(1, len(episode.turns)) if is_split and rng.random() < 0.6]
        for start, end in zip([0, *cuts], [*cuts, len(episode.turns)], strict=True):
            rows.append((number, episode.turns[start:end]))
    names = (*_TOKEN_VALUES, "logprobs", "entropy")
    tokens: dict[str, list[Array]] = {name: [] for name in names}
    masks: list[Array] = []
    lengths, ends = [], []
    for _, turns in rows:
        length = 0
        for turn in turns:
            gap, count = int(rng.integers(1, 5)), len(turn["values"])
            masks += [np.zeros(gap, np.bool_), np.ones(count, np.bool_)]
            for name in names:
                tokens[name] += [np.zeros(gap), turn[name]]
            length += gap + count
            ends.append(length)
        lengths.append(length)
    mask = np.concatenate(masks)
    owners = [group[number] for number, _ in rows]
    columns = {name: np.concatenate(values) for name, values in tokens.items()}
    columns |= {name: columns[name].astype(np.float32) for name in _TOKEN_VALUES}
    columns |= {
        name: np.array([owner.scores[name] for owner in owners], np.float32)
        for name in owners[0].scores
    }
    columns["finish_reason"] = columns["finish_reason"].astype(np.int8)
    columns |= {
        "token_ids": rng.integers(0, 9, len(mask)).astype(np.int32),
        "loss_mask": mask,
        "policy_version": np.where(mask, 0, -1).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "num_turns": np.array([len(turns) for _, turns in rows], np.int32),
        "turn_ends": np.array(ends, np.int32),
        "turn_states": np.array([turn["turn_states"] for _, turns in rows for turn in turns]),
    }
    if is_split:
        columns["episode"] = np.array([number for number, _ in rows], np.int32)
    return columns
