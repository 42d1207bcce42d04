"""Episodes as rows of a group: tokens with their source, ends and rewards of the turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.environments.interface import CallOutcome, Message
from streamrl.environments.rendering.turn_renderer import BridgeTokens
from streamrl.errors import EpisodeError
from streamrl.messages import (
    Array,
    FinishReason,
    Rollout,
    TokenSource,
    TurnOutcome,
    rollouts_to_columns,
)
from streamrl.rewards.interface.conversations import encode_conversations

_TURN_OUTCOMES = {
    CallOutcome.OK: TurnOutcome.CALLED,
    CallOutcome.MALFORMED: TurnOutcome.MALFORMED,
    CallOutcome.UNKNOWN_TOOL: TurnOutcome.MALFORMED,
    CallOutcome.WRONG_ARGUMENTS: TurnOutcome.MALFORMED,
    CallOutcome.TOOL_ERROR: TurnOutcome.TOOL_ERROR,
    CallOutcome.TIMED_OUT: TurnOutcome.TIMED_OUT,
}
_CONTEXT_TOKENS = 8
"""Tokens shown before and after the first difference of two prefixes."""


def find_turn_outcome(outcomes: Sequence[CallOutcome]) -> TurnOutcome:
    """Return the outcome of a turn from those of its calls: the worst, SPOKE without a call."""
    return max((_TURN_OUTCOMES[outcome] for outcome in outcomes), default=TurnOutcome.SPOKE)


@dataclass(frozen=True, eq=False)
class Episode:
    """Finished episode.

    rollout: all tokens, [T]. token_source: code of TokenSource, int8 [T].
    turn_ends: end of each turn's sampled tokens, ascending offsets in [1, T], one per turn.
    turn_rewards, turn_outcomes: one entry per turn.
    call_outcomes: one entry per tool call.
    score: the environment's score.
    messages: the whole conversation, the row's messages included.
    """

    rollout: Rollout
    token_source: Array
    turn_ends: Sequence[int]
    turn_rewards: Sequence[float]
    turn_outcomes: Sequence[TurnOutcome]
    call_outcomes: Sequence[CallOutcome]
    score: float
    messages: Sequence[Message]

    @property
    def num_invalid_calls(self) -> int:
        """Number of calls that could not be parsed, name no tool, or do not fit its schema."""
        return sum(
            _TURN_OUTCOMES[outcome] is TurnOutcome.MALFORMED for outcome in self.call_outcomes
        )


def episodes_to_columns(episodes: Sequence[Episode]) -> dict[str, Array]:
    """Concatenate the episodes of a group into ROLLOUT_COLUMNS and EPISODE_COLUMNS."""
    turns = [turn for episode in episodes for turn in episode.turn_ends]
    rewards = [reward for episode in episodes for reward in episode.turn_rewards]
    outcomes = [outcome for episode in episodes for outcome in episode.turn_outcomes]
    invalid = [episode.num_invalid_calls for episode in episodes]
    return rollouts_to_columns([episode.rollout for episode in episodes]) | {
        "token_source": np.concatenate([episode.token_source for episode in episodes]),
        "num_turns": np.array([len(episode.turn_ends) for episode in episodes], np.int32),
        "turn_ends": np.array(turns, np.int32),
        "turn_rewards": np.array(rewards, np.float32),
        "turn_outcomes": np.array(outcomes, np.int8),
        "num_calls": np.array([len(episode.call_outcomes) for episode in episodes], np.int32),
        "num_invalid_calls": np.array(invalid, np.int32),
        "environment_scores": np.array([episode.score for episode in episodes], np.float32),
        "conversations": encode_conversations([episode.messages for episode in episodes]),
    }


class EpisodeTokens:
    """Tokens of a running episode: appended turn by turn, never made again.

    prompt_ids: int32 [P].
    """

    def __init__(self, prompt_ids: Array) -> None:
        num_prompt = len(prompt_ids)
        self._rollout = Rollout(
            token_ids=prompt_ids,
            loss_mask=np.zeros(num_prompt, np.bool_),
            generator_logprobs=np.zeros(num_prompt, np.float32),
            policy_version=np.full(num_prompt, -1, np.int32),
            finish_reason=FinishReason.ABORT,
        )
        self._source = np.full(num_prompt, TokenSource.PROMPT, np.int8)
        self._num_prompt = num_prompt
        self.turn_ends: list[int] = []

    @property
    def token_ids(self) -> Array:
        return self._rollout.token_ids

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens after the prompt: sampled, scaffold and observations."""
        return len(self._rollout.token_ids) - self._num_prompt

    def append_turn(self, sampled: Rollout) -> Array:
        """Append a sampled turn; return its tokens, int32 [N].

        sampled: rollout whose prompt are all tokens of the episode so far. Raises EpisodeError if
            it does not begin with them.
        """
        start = len(self.token_ids)
        if not np.array_equal(sampled.token_ids[:start], self.token_ids):
            raise EpisodeError(_describe_difference(self.token_ids, sampled.token_ids[:start]))
        self._append(sampled, start, TokenSource.SAMPLED)
        self.turn_ends.append(len(self.token_ids))
        return self.token_ids[start:]

    def append_bridge(self, bridge: BridgeTokens) -> None:
        """Append what lies between two turns: scaffold and observation."""
        count = len(bridge.token_ids)
        masked = Rollout(
            token_ids=bridge.token_ids,
            loss_mask=np.zeros(count, np.bool_),
            generator_logprobs=np.zeros(count, np.float32),
            policy_version=np.full(count, -1, np.int32),
            finish_reason=FinishReason.ABORT,
        )
        self._append(masked, 0, TokenSource.SCAFFOLD)
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

    def finish(self, reason: FinishReason) -> tuple[Rollout, Array]:
        """Return the rollout and the source of each token, int8 [T]."""
        return replace(self._rollout, finish_reason=reason), self._source


def _describe_difference(expected: Array, actual: Array) -> str:
    length = min(len(expected), len(actual))
    differs = np.flatnonzero(expected[:length] != actual[:length])
    first = int(differs[0]) if len(differs) else length
    window = slice(max(0, first - _CONTEXT_TOKENS), first + _CONTEXT_TOKENS)
    return (
        f"the sampled turn does not continue the episode: token {first} of {len(expected)} differs;"
        f" sent {expected[window].tolist()}, got {actual[window].tolist()} from token"
        f" {window.start}"
    )
