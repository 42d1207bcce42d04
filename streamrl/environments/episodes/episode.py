"""Episodes as rows of a group: tokens with their source, ends and rewards of the turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.environments.interface import CallOutcome, EnvironmentStep, Message
from streamrl.environments.rendering.turn_renderer import BridgeTokens
from streamrl.errors import EpisodeError
from streamrl.messages import (
    EPISODE_COLUMN,
    Array,
    FinishReason,
    Rollout,
    TokenSource,
    TurnOutcome,
    rollouts_to_columns,
)
from streamrl.rewards.interface.completion import encode_conversations

_TURN_OUTCOMES = {
    CallOutcome.OK: TurnOutcome.CALLED,
    CallOutcome.MALFORMED: TurnOutcome.MALFORMED,
    CallOutcome.UNKNOWN_TOOL: TurnOutcome.MALFORMED,
    CallOutcome.WRONG_ARGUMENTS: TurnOutcome.MALFORMED,
    CallOutcome.TOOL_ERROR: TurnOutcome.TOOL_ERROR,
    CallOutcome.TIMED_OUT: TurnOutcome.TIMED_OUT,
}


SHOWN_TOKENS = 8
"""Tokens shown from the first difference of two prefixes."""


@dataclass(frozen=True, eq=False)
class EpisodeSample:
    """Training sample of an episode: all of its turns, or those after a rewritten conversation.

    rollout: all tokens, [T]. token_source: code of TokenSource, int8 [T].
    turn_ends: end of each turn's sampled tokens, ascending offsets in [1, T], one per turn of the
        sample.
    """

    rollout: Rollout
    token_source: Array
    turn_ends: Sequence[int]


@dataclass(eq=False)
class Episode:
    """Episode as it is filled turn by turn.

    messages: the whole conversation, the row's messages included.
    turn_rewards, turn_outcomes: one entry per turn.
    call_outcomes: one entry per tool call.
    score: the environment's score, at the end.
    samples: at the end at least one, in the order of their turns; all have the episode's finish
        reason.
    """

    messages: list[Message]
    turn_rewards: list[float] = field(default_factory=list)
    turn_outcomes: list[TurnOutcome] = field(default_factory=list)
    call_outcomes: list[CallOutcome] = field(default_factory=list)
    score: float = 0.0
    samples: Sequence[EpisodeSample] = ()

    def add_turn(self, result: EnvironmentStep) -> None:
        """Add what the environment gave for a turn; its outcome is the worst of its calls."""
        outcomes = [_TURN_OUTCOMES[outcome] for outcome in result.outcomes]
        self.turn_rewards.append(result.reward)
        self.turn_outcomes.append(max(outcomes, default=TurnOutcome.SPOKE))
        self.call_outcomes += result.outcomes

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].rollout.finish_reason

    @property
    def num_invalid_calls(self) -> int:
        """Number of calls that could not be parsed, name no tool, or do not fit its schema."""
        return sum(
            _TURN_OUTCOMES[outcome] is TurnOutcome.MALFORMED for outcome in self.call_outcomes
        )


def episodes_to_columns(
    episodes: Sequence[Episode], *, may_split: bool = False
) -> dict[str, Array]:
    """Concatenate the episodes of a group into ROLLOUT_COLUMNS and EPISODE_COLUMNS.

    may_split: with EPISODE_COLUMN, as an episode may have several samples. Columns with an entry
    per rollout repeat those of an episode for each of its samples, except for lengths and turns.
    """
    counts = [len(episode.samples) for episode in episodes]
    samples = [sample for episode in episodes for sample in episode.samples]
    turns = [end for sample in samples for end in sample.turn_ends]
    rewards = [reward for episode in episodes for reward in episode.turn_rewards]
    outcomes = [outcome for episode in episodes for outcome in episode.turn_outcomes]
    calls = np.array([len(episode.call_outcomes) for episode in episodes], np.int32)
    invalid = np.array([episode.num_invalid_calls for episode in episodes], np.int32)
    scores = np.array([episode.score for episode in episodes], np.float32)
    columns = rollouts_to_columns([sample.rollout for sample in samples]) | {
        "token_source": np.concatenate([sample.token_source for sample in samples]),
        "num_turns": np.array([len(sample.turn_ends) for sample in samples], np.int32),
        "turn_ends": np.array(turns, np.int32),
        "turn_rewards": np.array(rewards, np.float32),
        "turn_outcomes": np.array(outcomes, np.int8),
        "num_calls": np.repeat(calls, counts),
        "num_invalid_calls": np.repeat(invalid, counts),
        "environment_scores": np.repeat(scores, counts),
        "conversations": encode_conversations([episode.messages for episode in episodes]),
    }
    if may_split:
        columns[EPISODE_COLUMN] = np.repeat(np.arange(len(episodes), dtype=np.int32), counts)
    return columns


class EpisodeTokens:
    """Tokens of a running episode: appended turn by turn, never made again.

    prompt_ids: int32 [P]. num_appended: length of the episode if all its turns were appended, in
        one sample.
    """

    def __init__(self, prompt_ids: Array) -> None:
        self._num_prompt = self.num_appended = len(prompt_ids)
        self._finished: list[EpisodeSample] = []
        self._open_sample(prompt_ids)

    def _open_sample(self, prompt_ids: Array) -> None:
        self._rollout = _make_masked(prompt_ids)
        self._source = np.full(len(prompt_ids), TokenSource.PROMPT, np.int8)
        self._turn_ends: list[int] = []

    @property
    def token_ids(self) -> Array:
        """Tokens of the current sample, which the next turn continues."""
        return self._rollout.token_ids

    @property
    def num_samples(self) -> int:
        return len(self._finished) + 1

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens after the prompt: sampled, scaffold and observations."""
        return self.num_appended - self._num_prompt

    def start_sample(self, prompt_ids: Array, bridge: BridgeTokens) -> None:
        """Begin a new sample with a rewritten conversation; its tokens are not trained.

        prompt_ids: int32 [P]. bridge: tokens that would follow the last turn in the current sample.
            Where the rewritten conversation ends with them, they are no repetition, but the words
            of the environment that this sample has to show.
        """
        self._finished.append(EpisodeSample(self._rollout, self._source, self._turn_ends))
        self._open_sample(prompt_ids)
        self.num_appended += len(bridge.token_ids)
        count = _count_common_tail(prompt_ids, bridge.token_ids)
        start = len(prompt_ids) - count
        self._source[start:] = TokenSource.SCAFFOLD
        is_observation = bridge.is_observation[len(bridge.token_ids) - count :]
        self._source[start:][is_observation] = TokenSource.OBSERVATION

    def append_turn(self, sampled: Rollout) -> Array:
        """Append a sampled turn; return its tokens, int32 [N].

        sampled: rollout whose prompt are all tokens of the current sample so far. Raises
            EpisodeError if it does not begin with them.
        """
        start = len(self.token_ids)
        if not np.array_equal(sampled.token_ids[:start], self.token_ids):
            sent, got = self.token_ids.tolist(), sampled.token_ids[:start].tolist()
            pairs = enumerate(zip(sent, got, strict=False))
            first = next((i for i, (one, other) in pairs if one != other), len(got))
            shown = slice(first, first + SHOWN_TOKENS)
            raise EpisodeError(
                f"the sampled turn does not continue the episode: token {first} of {start} differs;"
                f" sent {sent[shown]}, got {got[shown]}"
            )
        self._append(sampled, start, TokenSource.SAMPLED)
        self._turn_ends.append(len(self.token_ids))
        return self.token_ids[start:]

    def append_bridge(self, bridge: BridgeTokens) -> None:
        """Append what lies between two turns: scaffold and observation."""
        count = len(bridge.token_ids)
        self._append(_make_masked(bridge.token_ids), 0, TokenSource.SCAFFOLD)
        self._source[-count:][bridge.is_observation] = TokenSource.OBSERVATION

    def _append(self, rollout: Rollout, start: int, source: TokenSource) -> None:
        names = ("token_ids", "loss_mask", "generator_logprobs", "policy_version")
        self._rollout = replace(
            self._rollout,
            **{
                name: np.concatenate([getattr(self._rollout, name), getattr(rollout, name)[start:]])
                for name in names
            },
        )
        added = np.full(len(rollout.token_ids) - start, source, np.int8)
        self._source = np.concatenate([self._source, added])
        self.num_appended += len(added)

    def finish(self, reason: FinishReason) -> list[EpisodeSample]:
        """Return the samples of the episode, which ended for this reason."""
        samples = [*self._finished, EpisodeSample(self._rollout, self._source, self._turn_ends)]
        return [
            replace(sample, rollout=replace(sample.rollout, finish_reason=reason))
            for sample in samples
        ]


def _make_masked(token_ids: Array) -> Rollout:
    """Return tokens that the policy did not sample as the beginning of a rollout."""
    count = len(token_ids)
    return Rollout(
        token_ids=token_ids,
        loss_mask=np.zeros(count, np.bool_),
        generator_logprobs=np.zeros(count, np.float32),
        policy_version=np.full(count, -1, np.int32),
        finish_reason=FinishReason.ABORT,
    )


def _count_common_tail(first: Array, second: Array) -> int:
    """Return the number of equal tokens at the end of both."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[len(first) - size :] != second[len(second) - size :])
    return size - 1 - int(differs.max(initial=-1))
