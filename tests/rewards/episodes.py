"""Episodes of tests, from segments of text."""

from collections.abc import Callable, Sequence

import numpy as np

from streamrl.environments.episodes.driver import Episode, EpisodeSample
from streamrl.environments.interface import Message
from streamrl.messages import FinishReason, Rollout, TokenSource, TurnOutcome

Segment = tuple[TokenSource, str, int]
"""Source, text and policy version of a segment; each sampled one is a turn."""
Encode = Callable[[str], Sequence[int]]
LOGPROB, TURN_REWARD = -0.12345, 0.5


def make_episode(encode: Encode, *samples: Sequence[Segment], score: float = 0.0) -> Episode:
    """Make an episode of samples; its messages are the texts without those of prompts."""
    made = [_make_sample(encode, segments) for segments in samples]
    count = sum(len(sample.turn_ends) for sample in made)
    roles = {TokenSource.SAMPLED: "assistant", TokenSource.OBSERVATION: "tool"}
    messages: list[Message] = [{"role": "user", "content": "?"}]
    messages += [
        {"role": roles[kind], "content": text}
        for segments in samples
        for kind, text, _ in segments
        if kind in roles
    ]
    outcomes = [TurnOutcome.CALLED] * count
    return Episode(messages, [TURN_REWARD] * count, outcomes, [], score, made, [0] * count)


def _make_sample(encode: Encode, segments: Sequence[Segment]) -> EpisodeSample:
    texts = [np.array(encode(text), np.int32) for _, text, _ in segments]
    sizes = [len(ids) for ids in texts]
    source = np.repeat([kind for kind, _, _ in segments], sizes).astype(np.int8)
    is_sampled = source == TokenSource.SAMPLED
    versions = np.repeat([version for _, _, version in segments], sizes)
    rollout = Rollout(
        np.concatenate(texts),
        is_sampled,
        np.where(is_sampled, LOGPROB, 0).astype(np.float32),
        np.where(is_sampled, versions, -1).astype(np.int32),
        FinishReason.STOP,
    )
    turns = [kind is TokenSource.SAMPLED for kind, _, _ in segments]
    return EpisodeSample(rollout, source, np.cumsum(sizes)[turns].tolist())
