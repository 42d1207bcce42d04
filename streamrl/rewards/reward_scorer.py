"""Workers of the reward stage: decode completions, score them, filter groups, record rollouts."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from streamrl.data.chat_template import decode_ids
from streamrl.errors import RewardError, StreamError
from streamrl.messages import (
    TOKEN_SCORES,
    Array,
    Columns,
    Experience,
    FilteredGroup,
    FinishReason,
    TokenSource,
    TurnOutcome,
    count_samples,
    find_first_samples,
    split_token_column,
)
from streamrl.rewards.group_filter import GroupFilter
from streamrl.rewards.interface.completion import Completion, decode_completions, decode_rollouts
from streamrl.rewards.reward_set import GroupRewardResult, RewardSet
from streamrl.stream.stage_worker import ComputeFunction, StageResult
from streamrl.telemetry.config import RolloutConfig
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout, RecordedTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_DETAILED_TOKENS = 16_384
"""Most sampled tokens of a group that are recorded one by one: 11 bytes each besides their text,
and 15 to 25 us to decode."""
_LOGPROB_DECIMALS = 3
_NO_SCORES = np.zeros(0, np.float32)
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
        return decode_ids(tokenizer, token_ids[start:end])

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


def measure_pieces(tokenizer: "PreTrainedTokenizerBase", token_ids: Array) -> list[int]:
    """Return the characters that each token, int32 [T], adds to the text without special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    is_special = np.isin(token_ids, [token for token, facts in added if facts.special])
    kept = token_ids[~is_special].tolist()
    sizes = np.zeros(len(token_ids), np.int64)
    sizes[~is_special] = [*map(len, split_text(tokenizer, kept, len(kept))[0])]
    lengths: list[int] = sizes.tolist()
    return lengths


def describe_rollouts(
    tokenizer: "PreTrainedTokenizerBase",
    columns: Columns,
    *,
    max_detailed_tokens: int = MAX_DETAILED_TOKENS,
) -> list[RecordedRollout]:
    """Return a record of each episode of a group, still without text of the answer and score.

    The turns of a later sample of an episode begin with its prompt, as those of the first. A
    rollout without an environment is an episode of one turn.

    columns: ROLLOUT_COLUMNS of a group, and EPISODE_COLUMNS with an environment; token_scores if a
    part of a score falls elsewhere than on the last token.
    max_detailed_tokens: most sampled tokens of the group that are recorded one by one, the same
    number in each rollout.
    """
    if "turn_ends" not in columns:
        columns = {**columns, **_make_single_turns(columns)}
    lengths, num_turns = columns["lengths"], columns["num_turns"]
    samples = count_samples(columns)
    names = ["token_ids", "token_source", "policy_version", "generator_logprobs", "loss_mask"]
    names += [TOKEN_SCORES] if TOKEN_SCORES in columns else []
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
            versions = groupby(tokens["policy_version"][start:end].tolist())
            reward, outcome = next(sampled_turns, (None, None))
            turn = msgspec.structs.replace(
                turn,
                reward=None if reward is None else float(reward),
                outcome=None if outcome is None else TurnOutcome(int(outcome)).name.lower(),
                scores=_list_scores(tokens.get(TOKEN_SCORES, _NO_SCORES)[start:end]),
                versions=tuple((version, len(list(run))) for version, run in versions),
                piece_lengths=tuple(map(len, pieces)),
                logprobs=_round_logprobs(tokens["generator_logprobs"][start:end][: len(pieces)]),
            )
            max_detailed -= len(pieces)
        yield turn


def _list_scores(scores: Array) -> tuple[tuple[int, float], ...]:
    """Return the token index and the number of all scores but 0."""
    return tuple((i, float(f"{scores[i]:.6g}")) for i in np.flatnonzero(scores).tolist())


def _round_logprobs(logprobs: Array) -> tuple[float | None, ...]:
    rounded = logprobs.astype(np.float64).round(_LOGPROB_DECIMALS) + 0.0  # -0.0 becomes 0.0
    return tuple(logprob if math.isfinite(logprob) else None for logprob in rounded.tolist())


MAX_RECORDED_CHARACTERS = 64_000_000
"""Most text of recorded groups between two drains; a scorer records no more until the next."""


async def _judge_group(
    rewards: RewardSet, experience: Experience, completions: Sequence[Completion]
) -> GroupRewardResult | StreamError:
    """Score the decoded completions of a group; return a RewardError instead of raising."""
    assert experience.prompt is not None
    try:
        return await rewards.judge_group(experience.prompt, completions)
    except RewardError as error:
        return error


def hash_answers(group_result: GroupRewardResult) -> Array:
    """Return answer ids for maj@k, int64 [G]: equal ids for equal answers, 0 for no answer.

    The first component with at least one answer supplies the answers.
    """
    candidates = [
        [result.answer for result in results]
        for results in group_result.components.values()
        if any(result.answer is not None for result in results)
    ]
    size = len(group_result.totals)
    answers: Sequence[str | None] = candidates[0] if candidates else [None] * size
    return np.array([0 if answer is None else _hash_answer(answer) for answer in answers], np.int64)


def _hash_answer(answer: str) -> int:
    digest = hashlib.blake2b(answer.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def describe_completion(group_result: GroupRewardResult, index: int) -> dict[str, Any]:
    """Return scores and outcomes of the completion at `index` by component, as JSON types.

    The score is None where the component abstains. `numbers` holds the extra metrics.
    """
    results = {name: group[index] for name, group in group_result.components.items()}
    numbers = {name: dict(r.extra_metrics) for name, r in results.items() if r.extra_metrics}
    return {
        "components": {name: None if r.is_not_judged else r.score for name, r in results.items()},
        "verdicts": {name: r.outcome.value for name, r in results.items()},
        **({"numbers": numbers} if numbers else {}),
    }


class RewardScorer:
    """Decodes completions and scores them with the run's rewards, all groups concurrently.

    group_filter: applies to groups of the stream, not to groups of an evaluation. recording: which
    scored groups are kept for `rollouts/`. pass_score: lowest score of a right completion.
    extra_columns: `token_scores`, for groups of which a part of a score falls elsewhere than on the
    last token, and `pass_rate`, the share of right completions.
    """

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: "PreTrainedTokenizerBase",
        group_filter: GroupFilter,
        recording: RolloutConfig,
        *,
        pass_score: float = 1.0,
        extra_columns: Collection[str] = (),
    ) -> None:
        self._pass_score = pass_score
        self._makes_token_scores = TOKEN_SCORES in extra_columns
        self._makes_pass_rate = "pass_rate" in extra_columns
        self._reward_set = rewards
        self._tokenizer = tokenizer
        self._group_filter = group_filter
        self._recording = recording
        self._recorded: list[RecordedGroup] = []
        self._num_recorded = 0

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Return per group `scores` and `reward/<name>`, float32 [G], a filter verdict or an error.

        Groups of an evaluation are never filtered, and also get the column `answers`.
        """
        return await asyncio.gather(*(self._score_group(experience) for experience in experiences))

    async def score_baseline(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Return column `baseline_scores`, float32 [G]: the unfiltered score of the greedy text."""
        return await asyncio.gather(*(self._score_greedy(experience) for experience in experiences))

    async def _score_greedy(self, experience: Experience) -> Columns | StreamError:
        columns = experience.columns
        (text,) = decode_completions(self._tokenizer, [columns["greedy_ids"]])
        group_result = await _judge_group(
            self._reward_set, experience, [Completion.from_text(text, columns["greedy_ids"])]
        )
        if isinstance(group_result, StreamError):
            return group_result
        baseline = group_result.totals.astype(np.float32)
        return {"baseline_scores": np.repeat(baseline, len(columns["lengths"]))}

    async def _score_group(self, experience: Experience) -> StageResult:
        """Score a group of the stream or of an evaluation; filter only groups of the stream.

        Columns of the stream have an entry per rollout, those of an evaluation per episode.
        """
        assert experience.prompt is not None
        completions = decode_rollouts(self._tokenizer, experience.columns)
        group_result = await _judge_group(self._reward_set, experience, completions)
        if isinstance(group_result, StreamError):
            return group_result
        columns = self._reward_set.to_columns(group_result)
        place = partial(self._place_scores, experience, group_result, completions)
        # Groups of an evaluation, and of an own loop, come without a lease.
        if not experience.lease.token:
            return {
                **columns,
                "answers": hash_answers(group_result),
                **(place() if self._makes_token_scores else {}),
            }
        pass_rate = self._reward_set.count_prompt(group_result.totals >= self._pass_score)
        reasons = experience.columns["finish_reason"]
        ends = {"finish_reason": reasons[find_first_samples(count_samples(experience.columns))]}
        try:
            reason = self._group_filter(experience.prompt, columns | ends)
        except RewardError as error:
            return error
        if reason:
            return FilteredGroup(reason, pass_rate if self._makes_pass_rate else None)
        token_scores: Columns = {}
        if group_result.has_places and (self._makes_token_scores or self._recording.every):
            token_scores = place()
        if self._recording.every and self._num_recorded < MAX_RECORDED_CHARACTERS:
            self._record_group(experience, completions, group_result, token_scores)
        made = dict(token_scores) if self._makes_token_scores else {}
        if self._makes_pass_rate:
            made["pass_rate"] = np.array([pass_rate], np.float32)
        return {**_repeat_per_rollout(columns, experience), **made}

    def _place_scores(
        self,
        experience: Experience,
        group_result: GroupRewardResult,
        completions: Sequence[Completion],
    ) -> Columns:
        """Return column `token_scores`, float32 [tokens]."""
        measure = partial(measure_pieces, self._tokenizer)
        placed = self._reward_set.place_scores(group_result, completions, measure)
        loss_mask = experience.columns["loss_mask"]
        column = np.zeros(len(loss_mask), np.float32)
        column[loss_mask] = placed
        return {TOKEN_SCORES: column}

    def _record_group(
        self,
        experience: Experience,
        completions: Sequence[Completion],
        group_result: GroupRewardResult,
        token_scores: Columns,
    ) -> None:
        assert experience.prompt is not None
        prompt = experience.prompt
        detailed = MAX_DETAILED_TOKENS if self._recording.logprobs else 0
        columns = {**experience.columns, **token_scores}
        rollouts = describe_rollouts(self._tokenizer, columns, max_detailed_tokens=detailed)
        self._recorded.append(
            RecordedGroup(
                step=0,  # known once the group is trained
                uid=experience.uid,
                environment=prompt.environment,
                prompt=tuple(dict(message) for message in prompt.messages),
                ground_truth=prompt.ground_truth,
                rollouts=tuple(
                    msgspec.structs.replace(
                        rollout,
                        completion=completion.conversation,
                        score=score,
                        **describe_completion(group_result, i),
                    )
                    for i, (rollout, completion, score) in enumerate(
                        zip(rollouts, completions, group_result.totals.tolist(), strict=True)
                    )
                ),
            )
        )
        self._num_recorded += sum(len(completion.conversation) for completion in completions)

    def drain_recorded(self) -> list[RecordedGroup]:
        """Return the groups recorded since the last call, in the order of their scoring."""
        recorded, self._recorded, self._num_recorded = self._recorded, [], 0
        return recorded


async def score_costs(
    costs: RewardSet, tokenizer: "PreTrainedTokenizerBase", experiences: Sequence[Experience]
) -> Sequence[StageResult]:
    """Return columns `costs` and `cost/<name>`, float32 [G], or an error, per group."""
    results = await asyncio.gather(
        *(
            _judge_group(costs, group, decode_rollouts(tokenizer, group.columns))
            for group in experiences
        )
    )
    return [
        result
        if isinstance(result, StreamError)
        else _repeat_per_rollout(costs.to_columns(result), group)
        for group, result in zip(experiences, results, strict=True)
    ]


def _repeat_per_rollout(columns: Columns, experience: Experience) -> Columns:
    """Return columns with an entry per rollout, from columns with an entry per episode."""
    samples = count_samples(experience.columns)
    return {name: np.repeat(column, samples) for name, column in columns.items()}


@dataclass(frozen=True)
class RewardStages:
    """Compute functions of the stages of rewards or of costs, by stage name.

    A function returns an error in place of a group that it cannot score.

    rewards: what they score with, to be started and closed.
    drain_recorded: returns the groups recorded since the last call.
    """

    functions: Mapping[str, ComputeFunction]
    rewards: RewardSet
    drain_recorded: Callable[[], Sequence[RecordedGroup]] = tuple
