"""Records of rollouts for `rollouts/`: their tokens by source and turn, versions and logprobs."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from streamrl.group_episodes import count_samples, find_first_samples
from streamrl.messages import (
    Array,
    Columns,
    FinishReason,
    TokenSource,
    TurnOutcome,
    split_token_column,
)
from streamrl.telemetry.rollout_log import RecordedRollout, RecordedTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_DETAILED_TOKENS = 16_384
"""Most sampled tokens of a group that are recorded one by one: 11 bytes each besides their text,
and 15 to 25 us to decode."""
_LOGPROB_DECIMALS = 3
_INCOMPLETE = "\ufffd"
"""Decoded text of a part of a character."""
_MAX_CHARACTER_TOKENS = 4
"""Bytes of the longest character in UTF-8; a longer run of incomplete tokens has invalid bytes."""


def split_text(
    tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], max_pieces: int
) -> tuple[list[str], str]:
    """Return the text that each of the first `max_pieces` tokens adds, and that of all others.

    A character of several tokens belongs to the last of them. Decoding token by token would lose
    such characters, and the spaces that some tokenizers write only between tokens.
    """

    def decode(start: int, end: int) -> str:
        ids = list(token_ids[start:end])
        (text,) = tokenizer.batch_decode(
            [ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    pieces: list[str] = []
    start = done = 0  # Tokens before `done` are decoded; those from `start` on are their context.
    num_pieces, total = min(max_pieces, len(token_ids)), len(token_ids)
    for end in range(1, num_pieces + 1):
        text = decode(start, end)
        is_incomplete = text.endswith(_INCOMPLETE) and end - done < _MAX_CHARACTER_TOKENS
        if is_incomplete and end < total:
            pieces.append("")
            continue
        pieces.append(text[len(decode(start, done)) :])
        start, done = done, end
    rest = decode(start, total)[len(decode(start, done)) :] if num_pieces < total else ""
    return pieces, rest


def describe_rollouts(
    tokenizer: "PreTrainedTokenizerBase",
    columns: Columns,
    *,
    max_detailed_tokens: int = MAX_DETAILED_TOKENS,
) -> list[RecordedRollout]:
    """Return a record of each episode of a group, still without text of the answer and score.

    The turns of a later sample of an episode begin with its prompt, as those of the first. A
    rollout without an environment is an episode of one turn.

    columns: ROLLOUT_COLUMNS of a group, and EPISODE_COLUMNS with an environment.
    max_detailed_tokens: most sampled tokens of the group that are recorded one by one, the same
    number in each rollout.
    """
    if "turn_ends" not in columns:
        columns = {**columns, **_make_single_turns(columns)}
    lengths, num_turns = columns["lengths"], columns["num_turns"]
    samples = count_samples(columns)
    names = ("token_ids", "token_source", "policy_version", "generator_logprobs", "loss_mask")
    token_columns = {name: split_token_column(columns[name], lengths) for name in names}
    turn_columns = {
        name: split_token_column(columns[name], num_turns)
        for name in ("turn_ends", "turn_rewards", "turn_outcomes")
        if name in columns
    }
    scores = columns.get("environment_scores")
    records = []
    for first, count in zip(find_first_samples(samples), samples, strict=True):
        rows = range(first, first + count)
        turns = [
            turn
            for i in rows
            for turn in _list_turns(
                tokenizer,
                {name: arrays[i] for name, arrays in token_columns.items()},
                {name: arrays[i] for name, arrays in turn_columns.items()},
                max_detailed_tokens // len(lengths),
            )
        ]
        masks = [token_columns["loss_mask"][i] for i in rows]
        versions = np.concatenate(
            [token_columns["policy_version"][i][mask] for i, mask in zip(rows, masks, strict=True)]
        )
        records.append(
            RecordedRollout(
                completion="",
                score=math.nan,
                turns=tuple(turns),
                row=int(first),
                tokens=int(sum(mask.sum() for mask in masks)),
                versions=(int(versions.min()), int(versions.max())) if versions.size else (),
                finish_reason=FinishReason(int(columns["finish_reason"][first])).name.lower(),
                environment_score=None if scores is None else float(scores[first]),
            )
        )
    return records


def _make_single_turns(columns: Columns) -> Columns:
    """Return the episode columns of rollouts without an environment: one turn, sampled last."""
    mask = columns["loss_mask"]
    return {
        "token_source": np.where(mask, TokenSource.SAMPLED, TokenSource.PROMPT).astype(np.int8),
        "num_turns": np.ones(len(columns["lengths"]), np.int32),
        "turn_ends": columns["lengths"].astype(np.int32),
    }


def _list_turns(
    tokenizer: "PreTrainedTokenizerBase", tokens: Columns, turns: Columns, max_detailed: int
) -> Iterator[RecordedTurn]:
    """Yield the turns of a rollout: cut where the source of the tokens changes or a turn ends.

    tokens: columns [T]. turns: columns with an entry per sampled turn.
    """
    source = tokens["token_source"]
    changes = np.flatnonzero(np.diff(source)) + 1
    bounds = np.unique(np.concatenate([[0, len(source)], changes, turns["turn_ends"]])).tolist()
    sampled_turns = zip(turns.get("turn_rewards", ()), turns.get("turn_outcomes", ()), strict=True)
    for start, end in pairwise(bounds):
        is_sampled = source[start] == TokenSource.SAMPLED
        ids = tokens["token_ids"][start:end].tolist()
        pieces, rest = split_text(tokenizer, ids, max_detailed if is_sampled else 0)
        turn = RecordedTurn(
            TokenSource(int(source[start])).name.lower(), "".join(pieces) + rest, end - start
        )
        if is_sampled:
            reward, outcome = next(sampled_turns, (None, None))
            turn = msgspec.structs.replace(
                turn,
                reward=None if reward is None else float(reward),
                outcome=None if outcome is None else TurnOutcome(int(outcome)).name.lower(),
                versions=_count_runs(tokens["policy_version"][start:end]),
                piece_lengths=tuple(map(len, pieces)),
                logprobs=_round_logprobs(tokens["generator_logprobs"][start:end][: len(pieces)]),
            )
            max_detailed -= len(pieces)
        yield turn


def _count_runs(versions: Array) -> tuple[tuple[int, int], ...]:
    return tuple((version, len(list(run))) for version, run in groupby(versions.tolist()))


def _round_logprobs(logprobs: Array) -> tuple[float | None, ...]:
    rounded = logprobs.astype(np.float64).round(_LOGPROB_DECIMALS) + 0.0  # -0.0 becomes 0.0
    return tuple(logprob if math.isfinite(logprob) else None for logprob in rounded.tolist())
